-- Pull consumers: who is asked about, and whether what is asked makes sense.

-- Most messages of one call.
CREATE OR REPLACE FUNCTION walbrook.receive_messages_max() RETURNS integer
LANGUAGE sql IMMUTABLE AS $$ SELECT 10000 $$;

-- Most bytes of messages of one call; one larger message goes alone.
CREATE OR REPLACE FUNCTION walbrook.receive_bytes_max() RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT 67108864::bigint $$;

-- So many messages may wait for an earlier one of their group, beside max_in_flight, until claims
-- look no further.
CREATE OR REPLACE FUNCTION walbrook.passed_over_max() RETURNS integer
LANGUAGE sql IMMUTABLE AS $$ SELECT 5000 $$;

-- ------------------------------------------------------------------------------------------------
-- Who is asked about, and whether what is asked makes sense.
CREATE OR REPLACE FUNCTION walbrook.pull_consumer(name text, to_receive boolean DEFAULT false)
RETURNS walbrook.pull_settings
LANGUAGE plpgsql AS $$
DECLARE
    known    record;
    settings walbrook.pull_settings;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'a transaction that is % cannot see what other claims have done meanwhile',
                        current_setting('transaction_isolation')
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'call it in a transaction of its own that is READ COMMITTED';
    END IF;
    SELECT c.id, c.destination, c.paused_at, c.active,
           count(*) FILTER (WHERE c.active) OVER () AS active_ones
      INTO known
      FROM walbrook.consumers c WHERE c.name = pull_consumer.name
     ORDER BY c.active DESC, c.id DESC LIMIT 1;
    IF known.active_ones > 1 THEN
        RAISE EXCEPTION 'consumer % is ambiguous: % sources have one each', pull_consumer.name, known.active_ones
            USING ERRCODE = 'WB004', COLUMN = 'consumer',
                  HINT = 'give one of them another name in its configuration';
    END IF;
    IF known.id IS NULL THEN
        RAISE EXCEPTION 'there is no consumer %', coalesce(quote_literal(pull_consumer.name), 'null')
            USING ERRCODE = 'WB001', COLUMN = 'consumer', HINT = 'walbrook.consumers lists them';
    END IF;
    SELECT p.* INTO settings FROM walbrook.pull_settings p WHERE p.consumer = known.id;
    IF NOT FOUND OR known.destination <> 'pull' THEN
        RAISE EXCEPTION 'consumer % has nothing to fetch: its messages are pushed to its destination (%)',
                        pull_consumer.name, coalesce(nullif(known.destination, ''), 'not started yet')
            USING ERRCODE = 'WB002', COLUMN = 'consumer',
                  HINT = 'give its sink a destination of type pull';
    END IF;
    -- The functions of pull workers run as their owner: here is asked what the caller itself may do.
    IF NOT has_table_privilege(coalesce(nullif(current_setting('role'), 'none'), session_user)::name,
                               format('walbrook.pull_messages_%s', known.id), 'SELECT') THEN
        RAISE EXCEPTION 'the role has no right to the messages of consumer %', pull_consumer.name
            USING ERRCODE = 'insufficient_privilege', COLUMN = 'consumer',
                  HINT = format('SELECT walbrook.grant_pull(role, %L) gives it', pull_consumer.name);
    END IF;
    IF to_receive AND known.paused_at IS NOT NULL THEN
        RAISE EXCEPTION 'consumer % is paused since %', pull_consumer.name, known.paused_at
            USING ERRCODE = 'WB003', COLUMN = 'consumer',
                  HINT = format('SELECT walbrook.resume(%L) lets it go on', pull_consumer.name);
    END IF;
    RETURN settings;
END
$$;

CREATE OR REPLACE FUNCTION walbrook.check_interval(field text, given interval, least_s numeric, most_s numeric)
RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF given IS NOT NULL
       AND (extract(epoch FROM given) < least_s OR extract(epoch FROM given) > most_s) THEN
        RAISE EXCEPTION '% is %, but should be between % and % seconds', field, given, least_s, most_s
            USING ERRCODE = 'invalid_parameter_value', COLUMN = field;
    END IF;
END
$$;

-- ack_ids as rows: which lease they speak of, and whether they are this consumer's.
CREATE OR REPLACE FUNCTION walbrook.read_ack_ids(ack_ids text[])
RETURNS TABLE (ack_id text, consumer integer, lease_id bigint, commit_lsn pg_lsn, commit_idx bigint)
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    -- None is fine: a worker need not look whether it was handed anything.
    IF ack_ids IS NULL OR cardinality(ack_ids) > walbrook.receive_messages_max() THEN
        RAISE EXCEPTION 'ack_ids has % of them, but should have at most %',
                        coalesce(cardinality(ack_ids)::text, 'none, not even an empty list,'),
                        walbrook.receive_messages_max()
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'ack_ids';
    END IF;
    IF array_position(ack_ids, NULL) IS NULL THEN
        RETURN QUERY
            SELECT a, split_part(a, '-', 1)::integer, split_part(a, '-', 2)::bigint,
                   split_part(a, '-', 3)::pg_lsn, split_part(a, '-', 4)::bigint
              FROM unnest(ack_ids) a ORDER BY 4, 5;
        RETURN;
    END IF;
    RAISE invalid_text_representation;
EXCEPTION WHEN invalid_text_representation OR numeric_value_out_of_range THEN
    RAISE EXCEPTION 'ack_ids has one in it that no message came with'
        USING ERRCODE = 'invalid_parameter_value', COLUMN = 'ack_ids',
              HINT = 'send them as walbrook.receive gave them';
END
$$;

CREATE OR REPLACE FUNCTION walbrook.check_receive(batch_size integer, visibility interval) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF batch_size IS NULL OR batch_size NOT BETWEEN 1 AND walbrook.receive_messages_max() THEN
        RAISE EXCEPTION 'batch_size is %, but should be between 1 and %',
                        coalesce(batch_size::text, 'null'), walbrook.receive_messages_max()
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'batch_size';
    END IF;
    PERFORM walbrook.check_interval('visibility', visibility, 1, 43200);
END
$$;
