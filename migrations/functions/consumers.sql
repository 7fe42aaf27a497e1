-- What an operator does, as functions. Each refuses what it cannot do and says why, answers with the
-- consumer's new state, and tells the running service at once (channel walbrook).
--
-- All of them lock the consumer's row before they touch its queue, as the service does; where it is a
-- pull consumer, before that what its claims lock, in their order.

-- A consumer that reads several databases has a row for each: one of them is named database/consumer.
CREATE OR REPLACE FUNCTION walbrook.find_consumer(named text) RETURNS walbrook.consumers
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers;
    sources text[];
    others text;
    found_id integer;
BEGIN
    SELECT array_agg(k.source ORDER BY k.source), min(k.id) INTO sources, found_id
      FROM walbrook.consumers k
     WHERE k.active AND (k.name = named OR k.source || '/' || k.name = named);
    IF cardinality(sources) > 1 THEN
        RAISE EXCEPTION 'consumer % is ambiguous: the sources % have one each', named,
                        array_to_string(sources, ', ')
            USING ERRCODE = 'too_many_rows',
                  HINT = format('name one of them as %s/%s', sources[1], named);
    END IF;
    SELECT * INTO c FROM walbrook.consumers k WHERE k.id = found_id;
    IF c.destination = 'pull' THEN
        PERFORM FROM walbrook.pull_positions s WHERE s.consumer = c.id FOR UPDATE;
        PERFORM FROM walbrook.pull_settings p WHERE p.consumer = c.id FOR UPDATE;
    END IF;
    -- Not FOR UPDATE: rows that refer to it may be added meanwhile.
    SELECT * INTO c FROM walbrook.consumers k
     WHERE k.id = c.id AND k.active FOR NO KEY UPDATE;
    IF c.name IS NOT NULL THEN
        RETURN c;
    END IF;
    SELECT string_agg(few.name, ', ' ORDER BY few.name) INTO others
      FROM (SELECT DISTINCT k.name FROM walbrook.consumers k WHERE k.active ORDER BY 1 LIMIT 20) few;
    IF EXISTS (SELECT FROM walbrook.consumers k
                WHERE k.name = named OR k.source || '/' || k.name = named) THEN
        RAISE EXCEPTION 'consumer % is not active: the configuration does not name it', named
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'add it to the configuration again and start the service; active ones: '
                         || coalesce(others, 'none');
    END IF;
    RAISE EXCEPTION 'there is no consumer %', coalesce(named, 'without a name')
        USING ERRCODE = 'WB001', HINT = 'there are: ' || coalesce(others, 'none yet');
END
$$;

COMMENT ON FUNCTION walbrook.find_consumer IS 'The one active consumer of that name, its row locked.';

CREATE OR REPLACE FUNCTION walbrook.called(source text, consumer text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN EXISTS (SELECT FROM walbrook.consumers k
                              WHERE k.name = called.consumer AND k.source <> called.source AND k.active)
                THEN called.source || '/' ELSE '' END || called.consumer
$$;

COMMENT ON FUNCTION walbrook.called IS 'What an operator calls a consumer: its name, or database/consumer if several databases have one.';

CREATE OR REPLACE FUNCTION walbrook.is_numbered(c walbrook.consumers) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM walbrook.event_sources e WHERE e.consumer = c.id)
$$;

COMMENT ON FUNCTION walbrook.is_numbered IS 'Whether its messages have numbers in place of cursors, as in event-time order: then what comes again has a number that its destination has not seen.';

CREATE OR REPLACE FUNCTION walbrook.is_paused(consumer_id integer) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM walbrook.consumers c
                    WHERE c.id = consumer_id AND c.paused_at IS NOT NULL)
$$;

COMMENT ON FUNCTION walbrook.is_paused IS 'Whether an operator holds this consumer (walbrook.consumers.id) back.';

-- What is below the end of every destination of these kinds is taken for a repeat.
CREATE OR REPLACE FUNCTION walbrook.keeps_position(destination text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT destination IN ('delta', 'file', 'iceberg', 'parquet', 'postgres', 'redis_stream',
                           'kafka_exactly_once')
$$;

-- Both spellings are read: 16/B374D848:3, as Postgres writes an LSN, and 97500059720:3, as
-- messages have it in metadata.idempotency_key.
CREATE OR REPLACE FUNCTION walbrook.parse_cursor(written text) RETURNS walbrook.place
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    lsn text := split_part(written, ':', 1);
BEGIN
    IF written ~* '^[0-9a-f]{1,8}/[0-9a-f]{1,8}:[0-9]{1,18}$' THEN
        RETURN ROW(lsn, split_part(written, ':', 2))::walbrook.place;
    ELSIF written ~ '^[0-9]{1,19}:[0-9]{1,18}$' AND lsn::numeric < 9223372036854775808 THEN
        RETURN ROW('0/0'::pg_lsn + lsn::numeric, split_part(written, ':', 2))::walbrook.place;
    END IF;
    RAISE EXCEPTION '''%'' is not a cursor', written
        USING ERRCODE = 'invalid_parameter_value',
              HINT = 'write it as LSN:index, such as 16/B374D848:3 or 97500059720:3';
END
$$;

CREATE OR REPLACE FUNCTION walbrook.cursor_text(written text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT p.lsn || ':' || p.idx FROM walbrook.parse_cursor(written) p
$$;

COMMENT ON FUNCTION walbrook.cursor_text IS 'A cursor in either spelling as 16/B374D848:3.';

CREATE OR REPLACE FUNCTION walbrook.cursor_key(written text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT (p.lsn - '0/0'::pg_lsn) || ':' || p.idx FROM walbrook.parse_cursor(written) p
$$;

COMMENT ON FUNCTION walbrook.cursor_key IS 'A cursor in either spelling as messages have it in idempotency_key: 97500059720:3.';

-- Not more than these are counted: counting holds locks that settling waits for.
CREATE OR REPLACE FUNCTION walbrook.counted_max() RETURNS integer
LANGUAGE sql IMMUTABLE AS $$ SELECT 10000 $$;

CREATE OR REPLACE FUNCTION walbrook.waiting(c walbrook.consumers) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    IF c.destination = 'pull' THEN
        RETURN (SELECT count(*) FROM (SELECT FROM walbrook.pull_messages r WHERE r.consumer = c.id
                                       LIMIT walbrook.counted_max()) few);
    END IF;
    RETURN (SELECT count(*) FROM (SELECT FROM walbrook.events e WHERE e.consumer = c.id
                                   LIMIT walbrook.counted_max()) few);
END
$$;

COMMENT ON FUNCTION walbrook.waiting IS 'How many messages are in a consumer''s queue; 10000 stands for 10000 or more.';

CREATE OR REPLACE FUNCTION walbrook.acted(
    id integer, action text, affected bigint, arguments jsonb DEFAULT '{}')
RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    answer walbrook.consumer_state;
BEGIN
    SELECT c.source, c.name, c.cursor_lsn || ':' || c.cursor_idx, c.paused_at,
           walbrook.waiting(c),
           (SELECT count(*) FROM (SELECT FROM walbrook.dead_letters d
                                   WHERE d.source = c.source AND d.consumer = c.name
                                   LIMIT walbrook.counted_max()) few),
           acted.affected, c.state, c.state_reason, c.generation
      INTO answer FROM walbrook.consumers c WHERE c.id = acted.id;
    PERFORM walbrook.announce(answer.source, answer.consumer, acted.action);
    PERFORM walbrook.note_act(
        acted.action,
        jsonb_build_object('source', answer.source, 'consumer', answer.consumer) || acted.arguments,
        format('done: %s affected, the cursor is %s', answer.affected, answer.cursor));
    PERFORM pg_notify('walbrook_pull', acted.id::text);  -- who waits for messages looks again
    RETURN answer;
END
$$;

COMMENT ON FUNCTION walbrook.acted IS 'Announce and note what an operator did to a consumer. Returns its new state.';

CREATE OR REPLACE FUNCTION walbrook.announce(source text, consumer text, action text) RETURNS void
LANGUAGE sql AS $$
    SELECT pg_notify('walbrook', json_build_object(
        'source', announce.source, 'consumer', announce.consumer, 'action', announce.action)::text)
$$;

COMMENT ON FUNCTION walbrook.announce IS 'Tell the running service what an operator did to a consumer (channel walbrook).';

CREATE OR REPLACE FUNCTION walbrook.pause(consumer text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(pause.consumer);
BEGIN
    UPDATE walbrook.consumers k SET paused_at = coalesce(k.paused_at, clock_timestamp())
     WHERE k.id = c.id;
    RETURN walbrook.acted(c.id, 'pause', 0);
END
$$;

COMMENT ON FUNCTION walbrook.pause IS 'Deliver nothing more to a consumer, from the end of what is under way on; it keeps its cursor.';

CREATE OR REPLACE FUNCTION walbrook.resume(consumer text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(resume.consumer);
BEGIN
    UPDATE walbrook.consumers k
       SET paused_at = NULL, disabled_at = NULL, disabled_reason = NULL,
           backlog_excused = k.backlog_excused OR k.disabled_at IS NOT NULL,
           -- That it was paused is no reason any more; its worker says the next one.
           state_reason = CASE WHEN k.paused_at IS NULL THEN k.state_reason END,
           state = CASE WHEN k.paused_at IS NULL THEN k.state END
     WHERE k.id = c.id;
    RETURN walbrook.acted(c.id, 'resume', 0);
END
$$;

COMMENT ON FUNCTION walbrook.resume IS 'Serve a paused consumer again, from its cursor on; one that failed is tried at once.';

CREATE OR REPLACE FUNCTION walbrook.accept_loss(consumer text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(accept_loss.consumer);
BEGIN
    UPDATE walbrook.consumers k SET lost_at = NULL, top_lsn = NULL, top_idx = NULL
     WHERE k.id = c.id;
    RETURN walbrook.acted(c.id, 'accept_loss', 0);
END
$$;

COMMENT ON FUNCTION walbrook.accept_loss IS 'Take note that the destination of a consumer lost messages that it had; ends destination_lost_data in walbrook.health.';
