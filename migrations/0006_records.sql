-- Pull consumers: what is stored for them, who holds what, and the functions they fetch with.
--
-- A message is a row of walbrook.records from when it is stored until it is acknowledged; the row is
-- never rewritten. Claims go through them once, in cursor order: below where the last claim of a
-- consumer got to (walbrook.claims), a message that is not gone has a small row in
-- walbrook.in_flight. So a claim costs the same whatever waits behind it or was there before it.
--
-- What must always hold:
-- * Claims of one consumer come one after another (each locks its row of walbrook.pulls), so nobody
--   is handed what somebody else holds.
-- * A message goes out only if no earlier one of its group, or of its whole table where one of the
--   two has its place there, is held by somebody else or waits.
-- * Whoever acknowledges never waits for a lock of walbrook.pulls (it may wait for a claim that is at
--   what it has to wake), and a claim never waits for an acknowledgement: it passes over the rows that
--   others are at. Locks are taken in the order stored, pulls, in_flight by cursor, records.
-- * What one statement locks the next one changes, never the same: whoever had to wait for the lock
--   has the row's newest version, which that statement's snapshot does not see.
-- * One that waits for an earlier one (lease_until and due_at null) is looked at again when that one
--   goes: a claim holds a lock on it that lets an acknowledgement through only after the claim.

CREATE TABLE walbrook.records (
    consumer         integer NOT NULL,
    commit_lsn       pg_lsn NOT NULL,
    commit_idx       bigint NOT NULL,
    group_id         bigint,
    whole_table      boolean NOT NULL DEFAULT false,
    bytes            integer NOT NULL,
    commit_timestamp timestamptz NOT NULL,
    stored_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    table_schema     text NOT NULL,
    table_name       text NOT NULL,
    action           text NOT NULL,
    message          json NOT NULL,
    PRIMARY KEY (consumer, commit_lsn, commit_idx)
) PARTITION BY LIST (consumer);

COMMENT ON TABLE walbrook.records IS 'Messages of pull consumers that are not acknowledged yet. One partition a consumer.';
COMMENT ON COLUMN walbrook.records.consumer IS 'walbrook.consumers.id.';
COMMENT ON COLUMN walbrook.records.commit_lsn IS 'With commit_idx: the cursor of the change.';
COMMENT ON COLUMN walbrook.records.group_id IS 'A number of its group: a message waits for every earlier one of its group. Null: it belongs to none.';
COMMENT ON COLUMN walbrook.records.whole_table IS 'It has its place among all messages of its table, as a truncate has.';
COMMENT ON COLUMN walbrook.records.bytes IS 'Size of the message.';
COMMENT ON COLUMN walbrook.records.message IS 'The message as the consumer gets it.';

CREATE TABLE walbrook.in_flight (
    consumer     integer NOT NULL,
    commit_lsn   pg_lsn NOT NULL,
    commit_idx   bigint NOT NULL,
    group_id     bigint,
    lease_id     bigint,
    lease_until  timestamptz,
    due_at       timestamptz,
    deliveries   integer NOT NULL,
    whole_table  boolean NOT NULL,
    table_schema text NOT NULL,
    table_name   text NOT NULL,
    holder       text,
    error        text,
    PRIMARY KEY (consumer, commit_lsn, commit_idx)
) PARTITION BY LIST (consumer);

CREATE INDEX in_flight_deadline ON walbrook.in_flight (consumer, lease_until)
    WHERE lease_until IS NOT NULL;
CREATE INDEX in_flight_due ON walbrook.in_flight (consumer, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX in_flight_group ON walbrook.in_flight (consumer, group_id, commit_lsn, commit_idx)
    WHERE group_id IS NOT NULL;
CREATE INDEX in_flight_waiting ON walbrook.in_flight (consumer, group_id, commit_lsn, commit_idx)
    WHERE lease_until IS NULL AND due_at IS NULL;
CREATE INDEX in_flight_whole_table ON walbrook.in_flight (consumer, table_schema, table_name)
    WHERE whole_table;

COMMENT ON TABLE walbrook.in_flight IS 'Messages of pull consumers that were handed out, came back, or wait for an earlier one of their group. One partition a consumer.';
COMMENT ON COLUMN walbrook.in_flight.lease_id IS 'The claim that handed it out last; only who has it may acknowledge it. Null once it was given back.';
COMMENT ON COLUMN walbrook.in_flight.lease_until IS 'Until when its holder keeps it; null while nobody does. After that the next claim takes it, and until then its holder may still acknowledge it.';
COMMENT ON COLUMN walbrook.in_flight.due_at IS 'From when it can be handed out again. With lease_until null too: it waits for an earlier one.';
COMMENT ON COLUMN walbrook.in_flight.deliveries IS 'How often it was handed out.';
COMMENT ON COLUMN walbrook.in_flight.error IS 'What its last holder said when it gave it back.';

CREATE TABLE walbrook.pulls (
    consumer       integer PRIMARY KEY REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    visibility_s   integer NOT NULL,
    max_in_flight  integer NOT NULL,
    max_deliveries integer NOT NULL,
    retry_first_ms integer NOT NULL,
    retry_max_ms   integer NOT NULL,
    max_messages   bigint,
    max_bytes      bigint,
    ttl_s          bigint,
    max_waiting    integer NOT NULL,
    gap_message    text NOT NULL
);

COMMENT ON TABLE walbrook.pulls IS 'The settings of each pull consumer, as its configuration had them at the last start. A claim locks its row.';
COMMENT ON COLUMN walbrook.pulls.gap_message IS 'What a gap looks like in the consumer''s shape, with marks where the cursor, the time and the reason go.';

CREATE TABLE walbrook.stored (
    consumer      integer PRIMARY KEY REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    commit_lsn    pg_lsn NOT NULL,
    commit_idx    bigint NOT NULL,
    messages_most bigint NOT NULL DEFAULT 0,
    bytes_most    bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 20);

COMMENT ON TABLE walbrook.stored IS 'How far each pull consumer''s messages are stored. Whoever stores locks its row.';
COMMENT ON COLUMN walbrook.stored.commit_lsn IS 'With commit_idx: the cursor of the last message that was stored; what comes again is known by it.';
COMMENT ON COLUMN walbrook.stored.messages_most IS 'At most so many messages wait: those counted last and all that came since.';

-- A row is put behind the last one and that one taken away, never rewritten: the newest is found at
-- the end of the index however many dead ones an old snapshot keeps before it.
CREATE TABLE walbrook.claims (
    consumer   integer NOT NULL REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    lease_id   bigint NOT NULL,
    commit_lsn pg_lsn NOT NULL,
    commit_idx bigint NOT NULL,
    swept_to   timestamptz NOT NULL DEFAULT '-infinity',
    swept_at   timestamptz NOT NULL DEFAULT '-infinity',
    rows_most  integer NOT NULL DEFAULT 0,
    held_most  integer NOT NULL DEFAULT 0,
    passed     integer NOT NULL DEFAULT 0,
    looked_at  integer NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer, lease_id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

COMMENT ON TABLE walbrook.claims IS 'Of each pull consumer the last claim, and where it got to.';
COMMENT ON COLUMN walbrook.claims.commit_lsn IS 'With commit_idx: everything up to here was handed out, or passed over for its group, or is gone.';
COMMENT ON COLUMN walbrook.claims.swept_to IS 'Leases that ended by then were looked at.';
COMMENT ON COLUMN walbrook.claims.swept_at IS 'When all leases were last looked at, whenever they ended: a clock may have been set back.';
COMMENT ON COLUMN walbrook.claims.rows_most IS 'At most so many rows are in flight: those counted last and all that came since. held_most: of them, handed out.';
COMMENT ON COLUMN walbrook.claims.passed IS 'How many it passed over because an earlier one of their group is not done.';
COMMENT ON COLUMN walbrook.claims.looked_at IS 'How many it looked at, in its last step.';

-- Whoever adds to it puts a row in place of those that nobody is at, so that nobody waits.
CREATE TABLE walbrook.buried (
    id       bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    consumer integer NOT NULL REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    messages bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

CREATE INDEX buried_consumer ON walbrook.buried (consumer);

COMMENT ON TABLE walbrook.buried IS 'How many messages of each pull consumer have ever become dead letters after they were stored: the sum of its rows. walbrook.consumers.dead counts those before.';

CREATE FUNCTION walbrook.dead_ever(c walbrook.consumers) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT c.dead + coalesce((SELECT sum(b.messages) FROM walbrook.buried b WHERE b.consumer = c.id), 0)::bigint
$$;

COMMENT ON FUNCTION walbrook.dead_ever IS 'How many changes have ever become dead letters of this consumer.';

CREATE OR REPLACE FUNCTION walbrook.make_queue(consumer integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF to_regclass(format('walbrook.events_%s', make_queue.consumer)) IS NULL THEN
        EXECUTE format('CREATE TABLE walbrook.events_%s PARTITION OF walbrook.events FOR VALUES IN (%s)',
                       make_queue.consumer, make_queue.consumer);
    END IF;
    IF to_regclass(format('walbrook.records_%s', make_queue.consumer)) IS NULL THEN
        EXECUTE format('CREATE TABLE walbrook.records_%s PARTITION OF walbrook.records FOR VALUES IN (%s) '
                       'WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000)',
                       make_queue.consumer, make_queue.consumer);
    END IF;
    IF to_regclass(format('walbrook.in_flight_%s', make_queue.consumer)) IS NULL THEN
        EXECUTE format('CREATE TABLE walbrook.in_flight_%s PARTITION OF walbrook.in_flight FOR VALUES IN (%s) '
                       'WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, '
                       'autovacuum_vacuum_cost_delay = 0)',
                       make_queue.consumer, make_queue.consumer);
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION walbrook.drop_queue() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('DROP TABLE IF EXISTS walbrook.events_%s, walbrook.records_%s, walbrook.in_flight_%s',
                   OLD.id, OLD.id, OLD.id);
    RETURN NULL;
END
$$;

SELECT walbrook.make_queue(id) FROM walbrook.consumers;

CREATE TYPE walbrook.received AS (
    ack_id       text,
    deliveries   integer,
    lease_until  timestamptz,
    commit_lsn   pg_lsn,
    commit_idx   bigint,
    table_schema text,
    table_name   text,
    action       text,
    message      json
);

-- ------------------------------------------------------------------------------------------------
-- Who is asked about, and whether what is asked makes sense.

CREATE FUNCTION walbrook.pull_consumer(name text, to_receive boolean DEFAULT false)
RETURNS walbrook.pulls
LANGUAGE plpgsql AS $$
DECLARE
    known    record;
    settings walbrook.pulls;
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
    SELECT p.* INTO settings FROM walbrook.pulls p WHERE p.consumer = known.id;
    IF NOT FOUND OR known.destination <> 'pull' THEN
        RAISE EXCEPTION 'consumer % has nothing to fetch: its messages are pushed to its destination (%)',
                        pull_consumer.name, coalesce(nullif(known.destination, ''), 'not started yet')
            USING ERRCODE = 'WB002', COLUMN = 'consumer',
                  HINT = 'give its sink a destination of type pull';
    END IF;
    -- The functions of pull workers run as their owner: here is asked what the caller itself may do.
    IF NOT has_table_privilege(coalesce(nullif(current_setting('role'), 'none'), session_user)::name,
                               format('walbrook.records_%s', known.id), 'SELECT') THEN
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

CREATE FUNCTION walbrook.check_interval(field text, given interval, least_s numeric, most_s numeric)
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
CREATE FUNCTION walbrook.read_ack_ids(ack_ids text[])
RETURNS TABLE (ack_id text, consumer integer, lease_id bigint, commit_lsn pg_lsn, commit_idx bigint)
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    -- None is fine: a worker need not look whether it was handed anything.
    IF ack_ids IS NULL OR cardinality(ack_ids) > 10000 THEN
        RAISE EXCEPTION 'ack_ids has % of them, but should have at most 10000',
                        coalesce(cardinality(ack_ids)::text, 'none, not even an empty list,')
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

-- ------------------------------------------------------------------------------------------------
-- Claims.

-- Whether a claim would find anything, without a lock: what was stored lies ahead of the last claim,
-- or something in flight is due.
CREATE FUNCTION walbrook.claimable(consumer integer) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    last walbrook.claims;
    due  timestamptz;
BEGIN
    SELECT c.* INTO last FROM walbrook.claims c
     WHERE c.consumer = claimable.consumer ORDER BY c.lease_id DESC LIMIT 1;
    IF EXISTS (SELECT FROM walbrook.stored s
                WHERE s.consumer = claimable.consumer
                  AND ((s.commit_lsn, s.commit_idx) > (last.commit_lsn, last.commit_idx)) IS NOT FALSE) THEN
        RETURN true;
    END IF;
    RETURN coalesce(walbrook.next_due(claimable.consumer) <= clock_timestamp(), false);
END
$$;

COMMENT ON FUNCTION walbrook.claimable IS 'Whether the next claim would find anything to look at.';

-- When something may have to be looked at again; null if nothing is in flight.
CREATE FUNCTION walbrook.next_due(consumer integer) RETURNS timestamptz
LANGUAGE plpgsql AS $$
DECLARE
    found timestamptz;
BEGIN
    EXECUTE format($query$
        SELECT least((SELECT min(f.due_at) FROM walbrook.in_flight_%1$s f
                       WHERE f.consumer = %1$s AND f.due_at IS NOT NULL),
                     (SELECT min(f.lease_until) FROM walbrook.in_flight_%1$s f
                       WHERE f.consumer = %1$s AND f.lease_until IS NOT NULL))
        $query$, next_due.consumer) INTO found;
    RETURN found;
END
$$;

-- How many a claim could look at, at most as many as asked.
CREATE FUNCTION walbrook.available(consumer integer, most bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    last  walbrook.claims;
    found bigint;
BEGIN
    SELECT c.* INTO last FROM walbrook.claims c
     WHERE c.consumer = available.consumer ORDER BY c.lease_id DESC LIMIT 1;
    EXECUTE format($query$
        SELECT (SELECT count(*) FROM (
                    SELECT FROM walbrook.records_%1$s r
                     WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
                     ORDER BY r.commit_lsn, r.commit_idx LIMIT $4) few)
             + (SELECT count(*) FROM (
                    SELECT FROM walbrook.in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.due_at <= $3 LIMIT $4) few)
             + (SELECT count(*) FROM (
                    SELECT FROM walbrook.in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.lease_until <= $3 LIMIT $4) few)
        $query$, available.consumer)
       INTO found
      USING coalesce(last.commit_lsn, '0/0'), coalesce(last.commit_idx, -1), clock_timestamp(), most;
    RETURN least(found, most);
END
$$;

-- An earlier one of these is gone: the first that waits behind it is looked at by the next claim.
CREATE FUNCTION walbrook.wake_waiting(consumer integer, group_ids bigint[], table_schemas text[],
                                      table_names text[], whole_tables boolean[], in_claim boolean)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    waiting boolean;
    locked  tid[];
BEGIN
    EXECUTE format('SELECT EXISTS (SELECT FROM walbrook.in_flight_%1$s f WHERE f.consumer = %1$s '
                   'AND f.lease_until IS NULL AND f.due_at IS NULL)', wake_waiting.consumer) INTO waiting;
    IF NOT waiting THEN
        RETURN false;
    END IF;
    -- A claim that has one locked now has not seen what is gone: it is waited for. Locked in cursor
    -- order, so that two who do this do not lock each other out. A claim itself (whoever has the lock
    -- of walbrook.pulls) waits for nobody: who has one locked wakes it.
    EXECUTE format($query$
        WITH chosen AS MATERIALIZED (
            SELECT w.commit_lsn, w.commit_idx
              FROM (SELECT DISTINCT g FROM unnest($1) g WHERE g IS NOT NULL) gone,
                   LATERAL (SELECT f.commit_lsn, f.commit_idx FROM walbrook.in_flight_%1$s f
                             WHERE f.consumer = %1$s AND f.group_id = gone.g
                               AND f.lease_until IS NULL AND f.due_at IS NULL
                             ORDER BY f.commit_lsn, f.commit_idx LIMIT 1) w
             UNION
            -- Where one has its place among all of its table, all that waits there is looked at.
            SELECT f.commit_lsn, f.commit_idx
              FROM (SELECT s, n FROM unnest($2, $3, $4) gone (s, n, whole) GROUP BY s, n
                    HAVING bool_or(whole)
                        OR EXISTS (SELECT FROM walbrook.in_flight_%1$s w
                                    WHERE w.consumer = %1$s AND w.whole_table
                                      AND w.table_schema = s AND w.table_name = n)) t
              JOIN walbrook.in_flight_%1$s f ON f.table_schema = t.s AND f.table_name = t.n
             WHERE f.consumer = %1$s AND f.lease_until IS NULL AND f.due_at IS NULL),
        locked AS MATERIALIZED (
            SELECT f.ctid
              FROM (SELECT * FROM chosen ORDER BY 1, 2) c,
                   LATERAL (SELECT f.ctid FROM walbrook.in_flight_%1$s f
                             WHERE f.consumer = %1$s AND f.commit_lsn = c.commit_lsn
                               AND f.commit_idx = c.commit_idx
                               AND f.lease_until IS NULL AND f.due_at IS NULL
                             LIMIT 1 FOR NO KEY UPDATE %2$s) f)
        SELECT array_agg(l.ctid) FROM locked l
        $query$, wake_waiting.consumer, CASE WHEN in_claim THEN 'SKIP LOCKED' END)
       INTO locked USING group_ids, table_schemas, table_names, whole_tables;
    EXECUTE format('UPDATE walbrook.in_flight_%s f SET due_at = clock_timestamp() WHERE f.ctid = ANY ($1)',
                   wake_waiting.consumer) USING locked;
    RETURN true;
END
$$;

-- The message goes in as text: a \u0000 in it, which json keeps and nothing can read, would make the
-- other members unreadable too; and its numbers stay what they were.
CREATE FUNCTION walbrook.record_as_event(r walbrook.records) RETURNS json
LANGUAGE sql STABLE AS $$
    SELECT json_build_object(
        'consumer', r.consumer, 'commit_lsn', r.commit_lsn, 'commit_idx', r.commit_idx,
        'group_id', r.group_id, 'whole_table', r.whole_table, 'bytes', r.bytes,
        'commit_timestamp', r.commit_timestamp, 'table_schema', r.table_schema,
        'table_name', r.table_name, 'action', r.action, 'message', r.message::text)
$$;

-- Give these up: each becomes a dead letter, and its group goes on.
CREATE FUNCTION walbrook.bury_records(consumer integer, lsns pg_lsn[], idxs bigint[], in_claim boolean)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    groups  bigint[];
    schemas text[];
    names   text[];
    wholes  boolean[];
BEGIN
    EXECUTE format($query$
        INSERT INTO walbrook.dead_letters AS d
               (source, consumer, commit_lsn, commit_idx, commit_timestamp, table_schema, table_name,
                action, kind, error, event, deliveries)
        SELECT c.source, c.name, r.commit_lsn, r.commit_idx, r.commit_timestamp, r.table_schema,
               r.table_name, r.action, 'delivery',
               format('it was handed out %%s times and never acknowledged; %%s', f.deliveries,
                      coalesce('its last holder said: ' || f.error,
                               format('%%s let its lease run out',
                                      coalesce('its last holder, ' || f.holder || ',', 'its last holder')))),
               walbrook.record_as_event(r), f.deliveries
          FROM unnest($1, $2) u (lsn, idx)
          JOIN walbrook.in_flight_%1$s f
            ON f.consumer = %1$s AND f.commit_lsn = u.lsn AND f.commit_idx = u.idx
          JOIN walbrook.records_%1$s r
            ON r.consumer = %1$s AND r.commit_lsn = u.lsn AND r.commit_idx = u.idx,
               walbrook.consumers c
         WHERE c.id = %1$s
            ON CONFLICT ON CONSTRAINT dead_letters_source_consumer_commit_lsn_commit_idx_key
            DO UPDATE SET kind = excluded.kind, error = excluded.error, event = excluded.event,
                          deliveries = excluded.deliveries, dead_at = excluded.dead_at
        $query$, bury_records.consumer) USING lsns, idxs;
    -- Not in walbrook.consumers: a worker's transaction that stays open would hold up who settles.
    WITH counted AS (
        DELETE FROM walbrook.buried b USING (
            SELECT k.id FROM walbrook.buried k
             WHERE k.consumer = bury_records.consumer FOR UPDATE SKIP LOCKED) k
         WHERE b.id = k.id RETURNING b.messages)
    INSERT INTO walbrook.buried (consumer, messages)
    SELECT bury_records.consumer, cardinality(lsns) + coalesce(sum(c.messages), 0) FROM counted c;
    EXECUTE format($query$
        WITH gone AS (
            DELETE FROM walbrook.in_flight_%1$s f USING unnest($1, $2) u (lsn, idx)
             WHERE f.consumer = %1$s AND f.commit_lsn = u.lsn AND f.commit_idx = u.idx
            RETURNING f.commit_lsn, f.commit_idx, f.group_id, f.table_schema, f.table_name, f.whole_table),
        erased AS (
            DELETE FROM walbrook.records_%1$s r USING gone
             WHERE r.consumer = %1$s AND r.commit_lsn = gone.commit_lsn AND r.commit_idx = gone.commit_idx)
        SELECT array_agg(group_id), array_agg(table_schema), array_agg(table_name), array_agg(whole_table)
          FROM gone
        $query$, bury_records.consumer) INTO groups, schemas, names, wholes USING lsns, idxs;
    PERFORM walbrook.wake_waiting(bury_records.consumer, groups, schemas, names, wholes, in_claim);
END
$$;

-- Those that this claim found behind an earlier one (due_at is its moment) wait for it. One whose
-- earlier ones are all being acknowledged right now is looked at again soon instead: whoever does
-- that has not seen that it waits.
CREATE FUNCTION walbrook.hold_back(consumer integer, lease bigint, moment timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    lsns  pg_lsn[];
    idxs  bigint[];
    found boolean[];
BEGIN
    -- In two steps: what a statement itself has changed it can no longer lock. Of each group, and of
    -- each table, the first that nobody is at is looked for once: who acknowledges may be at thousands.
    EXECUTE format($query$
        WITH waiters AS MATERIALIZED (
            SELECT w.commit_lsn, w.commit_idx, w.group_id, w.whole_table, w.table_schema, w.table_name,
                   row_number() OVER (PARTITION BY w.group_id ORDER BY w.commit_lsn, w.commit_idx) = 1
                   AS of_group,
                   row_number() OVER (PARTITION BY w.table_schema, w.table_name
                                      ORDER BY w.commit_lsn, w.commit_idx) = 1 AS of_table,
                   w.whole_table
                   AND row_number() OVER (PARTITION BY w.table_schema, w.table_name, w.whole_table
                                          ORDER BY w.commit_lsn, w.commit_idx) = 1 AS of_whole
              FROM walbrook.in_flight_%1$s w WHERE w.consumer = %1$s AND w.due_at = $2),
        looked AS MATERIALIZED (
            SELECT w.*, g.place AS in_group, t.place AS in_table, a.place AS in_whole
              FROM waiters w
              LEFT JOIN LATERAL (
                   SELECT ROW(e.commit_lsn, e.commit_idx) AS place FROM walbrook.in_flight_%1$s e
                    WHERE w.of_group AND e.consumer = %1$s AND e.group_id = w.group_id
                      AND e.lease_id IS DISTINCT FROM $1
                    ORDER BY e.commit_lsn, e.commit_idx LIMIT 1 FOR KEY SHARE SKIP LOCKED) g ON true
              LEFT JOIN LATERAL (
                   SELECT ROW(e.commit_lsn, e.commit_idx) AS place FROM walbrook.in_flight_%1$s e
                    WHERE w.of_table AND e.consumer = %1$s AND e.whole_table
                      AND e.table_schema = w.table_schema AND e.table_name = w.table_name
                      AND e.lease_id IS DISTINCT FROM $1
                    ORDER BY e.commit_lsn, e.commit_idx LIMIT 1 FOR KEY SHARE SKIP LOCKED) t ON true
              LEFT JOIN LATERAL (
                   SELECT ROW(e.commit_lsn, e.commit_idx) AS place FROM walbrook.in_flight_%1$s e
                    WHERE w.of_whole AND e.consumer = %1$s
                      AND e.table_schema = w.table_schema AND e.table_name = w.table_name
                      AND e.lease_id IS DISTINCT FROM $1
                    ORDER BY e.commit_lsn, e.commit_idx LIMIT 1 FOR KEY SHARE SKIP LOCKED) a ON true),
        judged AS (
            SELECT l.commit_lsn, l.commit_idx,
                   first_value(l.in_group) OVER (PARTITION BY l.group_id ORDER BY l.commit_lsn, l.commit_idx)
                   < ROW(l.commit_lsn, l.commit_idx) AS is_behind,
                   first_value(l.in_table) OVER (PARTITION BY l.table_schema, l.table_name
                                                 ORDER BY l.commit_lsn, l.commit_idx)
                   < ROW(l.commit_lsn, l.commit_idx) AS is_behind_whole,
                   l.whole_table
                   AND first_value(l.in_whole) OVER (PARTITION BY l.table_schema, l.table_name, l.whole_table
                                                     ORDER BY l.commit_lsn, l.commit_idx)
                       < ROW(l.commit_lsn, l.commit_idx) AS is_behind_table
              FROM looked l)
        SELECT array_agg(j.commit_lsn), array_agg(j.commit_idx),
               array_agg(coalesce(j.is_behind, false) OR coalesce(j.is_behind_whole, false)
                         OR coalesce(j.is_behind_table, false))
          FROM judged j
        $query$, hold_back.consumer) INTO lsns, idxs, found USING lease, moment;
    EXECUTE format($query$
        UPDATE walbrook.in_flight_%1$s f
           SET due_at = CASE WHEN NOT u.found THEN $4 + interval '20 milliseconds' END
          FROM unnest($1, $2, $3) u (lsn, idx, found)
         WHERE f.consumer = %1$s AND f.commit_lsn = u.lsn AND f.commit_idx = u.idx
        $query$, hold_back.consumer) USING lsns, idxs, found, moment;
END
$$;

-- What came back or was not acknowledged in time, in cursor order, and with each what waits for it.
CREATE FUNCTION walbrook.claim_again(settings walbrook.pulls, last walbrook.claims, batch_size integer,
                                     room integer, lease bigint, moment timestamptz,
                                     until timestamptz, holder text)
RETURNS SETOF walbrook.received
LANGUAGE plpgsql AS $$
DECLARE
    id        integer := settings.consumer;
    take_lsns pg_lsn[];
    take_idxs bigint[];
    dead_lsns pg_lsn[];
    dead_idxs bigint[];
    wait_lsns pg_lsn[];
    wait_idxs bigint[];
BEGIN
    EXECUTE format($query$
        WITH due AS MATERIALIZED (
            SELECT f.*
              FROM (SELECT f.commit_lsn, f.commit_idx FROM walbrook.in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.due_at <= $2
                     UNION ALL
                    SELECT f.commit_lsn, f.commit_idx FROM walbrook.in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.lease_until > $1 AND f.lease_until <= $2
                     ORDER BY 1, 2) c,
                   LATERAL (SELECT f.commit_lsn, f.commit_idx, f.group_id, f.whole_table,
                                   f.table_schema, f.table_name, f.deliveries
                              FROM walbrook.in_flight_%1$s f
                             WHERE f.consumer = %1$s
                               AND f.commit_lsn = c.commit_lsn AND f.commit_idx = c.commit_idx
                               AND coalesce(f.lease_until, f.due_at) <= $2
                             LIMIT 1 FOR UPDATE SKIP LOCKED) f
             LIMIT $3),
        followers AS MATERIALIZED (
            SELECT w.*
              FROM (SELECT DISTINCT d.group_id FROM due d WHERE d.group_id IS NOT NULL) g,
                   LATERAL (SELECT f.commit_lsn, f.commit_idx, f.group_id, f.whole_table,
                                   f.table_schema, f.table_name, f.deliveries
                              FROM walbrook.in_flight_%1$s f
                             WHERE f.consumer = %1$s AND f.group_id = g.group_id
                               AND f.lease_until IS NULL AND f.due_at IS NULL
                             ORDER BY f.commit_lsn, f.commit_idx LIMIT $4
                               FOR UPDATE SKIP LOCKED) w),
        together AS MATERIALIZED (
            SELECT *, true AS is_due FROM due UNION ALL SELECT *, false FROM followers),
        -- Of each group the first that is in flight and not among these.
        outside AS MATERIALIZED (
            SELECT g.group_id, e.commit_lsn, e.commit_idx
              FROM (SELECT DISTINCT t.group_id FROM together t WHERE t.group_id IS NOT NULL) g,
                   LATERAL (SELECT f.commit_lsn, f.commit_idx FROM walbrook.in_flight_%1$s f
                             WHERE f.consumer = %1$s AND f.group_id = g.group_id
                               AND (f.commit_lsn, f.commit_idx)
                                   NOT IN (SELECT t.commit_lsn, t.commit_idx FROM together t)
                             ORDER BY f.commit_lsn, f.commit_idx LIMIT 1) e),
        seen AS (
            SELECT t.*, r.bytes,
                   coalesce((o.commit_lsn, o.commit_idx) < (t.commit_lsn, t.commit_idx), false)
                   OR EXISTS (SELECT FROM walbrook.in_flight_%1$s e
                               WHERE e.consumer = %1$s AND e.whole_table
                                 AND e.table_schema = t.table_schema AND e.table_name = t.table_name
                                 AND (e.commit_lsn, e.commit_idx) < (t.commit_lsn, t.commit_idx)
                                 AND (e.commit_lsn, e.commit_idx)
                                     NOT IN (SELECT x.commit_lsn, x.commit_idx FROM together x))
                   OR t.whole_table
                      AND EXISTS (SELECT FROM walbrook.in_flight_%1$s e
                                   WHERE e.consumer = %1$s
                                     AND e.table_schema = t.table_schema AND e.table_name = t.table_name
                                     AND (e.commit_lsn, e.commit_idx) < (t.commit_lsn, t.commit_idx)
                                     AND (e.commit_lsn, e.commit_idx)
                                         NOT IN (SELECT x.commit_lsn, x.commit_idx FROM together x))
                   AS is_behind
              FROM together t
              JOIN walbrook.records_%1$s r
                ON r.consumer = %1$s AND r.commit_lsn = t.commit_lsn AND r.commit_idx = t.commit_idx
              LEFT JOIN outside o ON o.group_id = t.group_id),
        judged AS (
            SELECT s.*, s.is_behind
                   OR coalesce(bool_or(s.is_behind AND s.whole_table)
                               OVER (PARTITION BY s.table_schema, s.table_name
                                     ORDER BY s.commit_lsn, s.commit_idx), false) AS waits
              FROM seen s),
        fates AS (
            SELECT j.*, CASE WHEN j.waits THEN 'wait'
                             WHEN j.deliveries >= $5 THEN 'dead' ELSE 'take' END AS fate
              FROM judged j),
        counted AS (
            SELECT f.*, row_number() OVER place AS n, sum(f.bytes) OVER place - f.bytes AS bytes_before
              FROM fates f
            WINDOW place AS (PARTITION BY f.fate ORDER BY f.commit_lsn, f.commit_idx))
        SELECT array_agg(commit_lsn) FILTER (WHERE fate = 'take' AND n <= $3 AND bytes_before < 67108864),
               array_agg(commit_idx) FILTER (WHERE fate = 'take' AND n <= $3 AND bytes_before < 67108864),
               array_agg(commit_lsn) FILTER (WHERE fate = 'dead'),
               array_agg(commit_idx) FILTER (WHERE fate = 'dead'),
               array_agg(commit_lsn) FILTER (WHERE fate = 'wait' AND is_due),
               array_agg(commit_idx) FILTER (WHERE fate = 'wait' AND is_due)
          FROM counted
        $query$, id)
       INTO take_lsns, take_idxs, dead_lsns, dead_idxs, wait_lsns, wait_idxs
      USING last.swept_to, moment, batch_size, room, settings.max_deliveries;
    IF dead_lsns IS NOT NULL THEN
        PERFORM walbrook.bury_records(id, dead_lsns, dead_idxs, in_claim => true);
    END IF;
    IF take_lsns IS NOT NULL THEN
        RETURN QUERY EXECUTE format($query$
            WITH taken AS (
                UPDATE walbrook.in_flight_%1$s f
                   SET lease_id = $3, lease_until = $4, due_at = NULL, holder = $5,
                       deliveries = f.deliveries + 1
                  FROM unnest($1, $2) u (lsn, idx)
                 WHERE f.consumer = %1$s AND f.commit_lsn = u.lsn AND f.commit_idx = u.idx
                RETURNING f.commit_lsn, f.commit_idx, f.deliveries)
            SELECT concat('%1$s-', $3, '-', r.commit_lsn, '-', r.commit_idx), t.deliveries, $4,
                   r.commit_lsn, r.commit_idx, r.table_schema, r.table_name, r.action, r.message
              FROM taken t
              JOIN walbrook.records_%1$s r
                ON r.consumer = %1$s AND r.commit_lsn = t.commit_lsn AND r.commit_idx = t.commit_idx
             ORDER BY r.commit_lsn, r.commit_idx
            $query$, id) USING take_lsns, take_idxs, lease, until, holder;
    END IF;
    IF wait_lsns IS NOT NULL THEN
        EXECUTE format($query$
            UPDATE walbrook.in_flight_%1$s f SET lease_until = NULL, due_at = $3
              FROM unnest($1, $2) u (lsn, idx)
             WHERE f.consumer = %1$s AND f.commit_lsn = u.lsn AND f.commit_idx = u.idx
            $query$, id) USING wait_lsns, wait_idxs, moment;
        PERFORM walbrook.hold_back(id, lease, moment);
    END IF;
END
$$;

-- What nobody was handed yet, from where the last claim got to.
CREATE FUNCTION walbrook.claim_fresh(settings walbrook.pulls, last walbrook.claims, wanted integer,
                                     most integer, lease bigint, moment timestamptz,
                                     until timestamptz, holder text)
RETURNS SETOF walbrook.received
LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY EXECUTE format($query$
        WITH fresh AS MATERIALIZED (
            SELECT r.commit_lsn, r.commit_idx, r.group_id, r.whole_table, r.bytes, r.table_schema,
                   r.table_name, r.action, r.message
              FROM walbrook.records_%1$s r
             WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
             ORDER BY r.commit_lsn, r.commit_idx LIMIT $4),
        seen AS MATERIALIZED (
            SELECT f.*,
                   coalesce((SELECT true FROM walbrook.in_flight_%1$s e
                              WHERE e.consumer = %1$s AND e.group_id = f.group_id
                                AND e.lease_id IS DISTINCT FROM $5 LIMIT 1),
                            (SELECT true FROM walbrook.in_flight_%1$s e
                              WHERE e.consumer = %1$s AND e.whole_table
                                AND e.table_schema = f.table_schema AND e.table_name = f.table_name
                                AND e.lease_id IS DISTINCT FROM $5 LIMIT 1),
                            f.whole_table
                            AND (SELECT true FROM walbrook.in_flight_%1$s e
                                  WHERE e.consumer = %1$s
                                    AND e.table_schema = f.table_schema AND e.table_name = f.table_name
                                    AND e.lease_id IS DISTINCT FROM $5 LIMIT 1),
                            false) AS is_behind
              FROM fresh f),
        judged AS (
            SELECT s.*, s.is_behind
                   OR coalesce(bool_or(s.is_behind AND s.whole_table)
                               OVER (PARTITION BY s.table_schema, s.table_name
                                     ORDER BY s.commit_lsn, s.commit_idx), false) AS waits
              FROM seen s),
        counted AS (
            SELECT j.*,
                   coalesce(count(*) FILTER (WHERE NOT j.waits) OVER before, 0) AS taken_before,
                   coalesce(sum(j.bytes) FILTER (WHERE NOT j.waits) OVER before, 0) AS bytes_before
              FROM judged j
            WINDOW before AS (ORDER BY j.commit_lsn, j.commit_idx
                              ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)),
        passed AS MATERIALIZED (
            SELECT * FROM counted c WHERE c.taken_before < $3 AND c.bytes_before < 67108864),
        put AS (
            INSERT INTO walbrook.in_flight_%1$s
                   (consumer, commit_lsn, commit_idx, group_id, lease_id, lease_until, due_at,
                    deliveries, whole_table, table_schema, table_name, holder)
            SELECT %1$s, p.commit_lsn, p.commit_idx, p.group_id,
                   CASE WHEN NOT p.waits THEN $5 END, CASE WHEN NOT p.waits THEN $7 END,
                   CASE WHEN p.waits THEN $6 END, CASE WHEN p.waits THEN 0 ELSE 1 END,
                   p.whole_table, p.table_schema, p.table_name, CASE WHEN NOT p.waits THEN $8 END
              FROM passed p),
        noted AS (
            INSERT INTO walbrook.claims AS c
                   (consumer, lease_id, commit_lsn, commit_idx, swept_to, swept_at, rows_most,
                    held_most, passed, looked_at)
            SELECT %1$s, $5, p.lsns[1], p.idxs[1], $9, $10, $11 + p.rows, $12 + p.rows - p.waiting,
                   p.waiting, p.rows
              FROM (SELECT array_agg(x.commit_lsn ORDER BY x.commit_lsn DESC, x.commit_idx DESC) AS lsns,
                           array_agg(x.commit_idx ORDER BY x.commit_lsn DESC, x.commit_idx DESC) AS idxs,
                           count(*) AS rows, count(*) FILTER (WHERE x.waits) AS waiting
                      FROM passed x) p
             WHERE p.rows > 0
                ON CONFLICT ON CONSTRAINT claims_pkey DO UPDATE
               SET commit_lsn = excluded.commit_lsn, commit_idx = excluded.commit_idx,
                   rows_most = excluded.rows_most, held_most = excluded.held_most,
                   passed = c.passed + excluded.passed, looked_at = excluded.looked_at)
        SELECT concat('%1$s-', $5, '-', p.commit_lsn, '-', p.commit_idx), 1, $7, p.commit_lsn,
               p.commit_idx, p.table_schema, p.table_name, p.action, p.message
          FROM passed p WHERE NOT p.waits ORDER BY p.commit_lsn, p.commit_idx
        $query$, settings.consumer)
        USING last.commit_lsn, last.commit_idx, wanted, most, lease, moment, until, holder,
              last.swept_to, last.swept_at, last.rows_most, last.held_most;
END
$$;

-- So many wait for an earlier one of their group that claims look no further: others stand behind them.
CREATE FUNCTION walbrook.say_held_up(settings walbrook.pulls, is_full boolean) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF is_full THEN
        INSERT INTO walbrook.health_events (source, consumer, kind, severity, what, fix)
        SELECT c.source, c.name, 'claims_held_up', 'warning',
               format('claims of %s look no further: more messages than its max_in_flight allows for are '
                      'handed out or wait for an earlier one of their group', c.name),
               'walbrook.leases says who holds what: let the holders acknowledge, or raise max_in_flight '
               'of its destination'
          FROM walbrook.consumers c WHERE c.id = settings.consumer
            ON CONFLICT (source, coalesce(consumer, ''), kind) WHERE resolved_at IS NULL
            DO UPDATE SET seen_at = clock_timestamp();
    ELSE
        UPDATE walbrook.health_events e SET resolved_at = clock_timestamp()
          FROM walbrook.consumers c
         WHERE c.id = settings.consumer AND e.source = c.source AND e.consumer = c.name
           AND e.kind = 'claims_held_up' AND e.resolved_at IS NULL;
    END IF;
END
$$;

-- One pass for one claimer: what came back first, then what nobody had yet. It goes through at most
-- twenty steps of messages that it must pass over, and comes back with less then.
CREATE FUNCTION walbrook.claim(consumer integer, batch_size integer, visibility interval, holder text)
RETURNS SETOF walbrook.received
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    id       CONSTANT integer := claim.consumer;
    spare    CONSTANT integer := 5000;
    settings walbrook.pulls;
    last     walbrook.claims;
    noted    walbrook.claims;
    next     record;
    lease    bigint;
    moment   timestamptz;
    until    timestamptz;
    wanted   bigint;
    most     bigint;
    got      bigint;
    taken    bigint := 0;
    passed   integer := 0;
    is_swept boolean := false;
BEGIN
    SELECT p.* INTO settings FROM walbrook.pulls p WHERE p.consumer = id FOR NO KEY UPDATE;
    -- Whoever pauses it holds that lock.
    IF EXISTS (SELECT FROM walbrook.consumers c WHERE c.id = claim.consumer AND c.paused_at IS NOT NULL) THEN
        RETURN;
    END IF;
    lease := nextval('walbrook.lease_ids');
    SELECT c.* INTO last FROM walbrook.claims c
     WHERE c.consumer = id ORDER BY c.lease_id DESC LIMIT 1;
    IF NOT FOUND THEN
        last := ROW(id, 0, '0/0', -1, '-infinity', '-infinity', 0, 0, 0, 0);
    END IF;
    moment := clock_timestamp();
    until := moment + coalesce(visibility, make_interval(secs => settings.visibility_s));
    IF settings.ttl_s IS NOT NULL THEN
        PERFORM walbrook.drop_aged(settings, last);
    END IF;
    IF last.held_most + batch_size > settings.max_in_flight
       OR last.rows_most + batch_size > settings.max_in_flight + spare THEN
        EXECUTE format('SELECT count(*), count(*) FILTER (WHERE deliveries > 0) FROM walbrook.in_flight_%s', id)
           INTO last.rows_most, last.held_most;
    END IF;
    -- All of them every so often, and when the clock was set back.
    IF NOT moment BETWEEN last.swept_at AND last.swept_at + interval '10 seconds' THEN
        last.swept_to := '-infinity';
        last.swept_at := moment;
        is_swept := true;
        PERFORM walbrook.say_held_up(settings, last.rows_most + batch_size > settings.max_in_flight + spare);
        -- With them the first of what waits, should nobody have woken it.
        EXECUTE format($query$
            UPDATE walbrook.in_flight_%1$s f SET due_at = $1
              FROM (SELECT f.commit_lsn, f.commit_idx FROM walbrook.in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.lease_until IS NULL AND f.due_at IS NULL
                     ORDER BY f.commit_lsn, f.commit_idx LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED) w
             WHERE f.consumer = %1$s AND f.commit_lsn = w.commit_lsn AND f.commit_idx = w.commit_idx
            $query$, id) USING moment;
    END IF;
    wanted := least(batch_size, settings.max_in_flight - last.held_most);
    most := greatest(least(wanted, settings.max_in_flight + spare - last.rows_most), 0);
    FOR step IN 1..5 LOOP
        -- Most often nothing is due, and nothing of what comes next waits for anything.
        EXECUTE format($query$
            SELECT EXISTS (SELECT FROM walbrook.in_flight_%1$s f
                            WHERE f.consumer = %1$s AND f.due_at <= $6)
                   OR EXISTS (SELECT FROM walbrook.in_flight_%1$s f
                               WHERE f.consumer = %1$s AND f.lease_until > $5 AND f.lease_until <= $6)
                   AS is_due,
                   count(*) AS rows, max(n.commit_lsn) AS commit_lsn,
                   (array_agg(n.commit_idx ORDER BY n.commit_lsn DESC, n.commit_idx DESC))[1] AS commit_idx,
                   sum(n.bytes) < 67108864
                   AND bool_or(n.whole_table
                               OR (SELECT true FROM walbrook.in_flight_%1$s e
                                    WHERE e.consumer = %1$s AND e.group_id = n.group_id
                                      AND e.lease_id IS DISTINCT FROM $3 LIMIT 1)) IS NOT TRUE
                   AND NOT EXISTS (SELECT FROM walbrook.in_flight_%1$s e
                                    WHERE e.consumer = %1$s AND e.whole_table) AS are_free
              FROM (SELECT r.commit_lsn, r.commit_idx, r.group_id, r.whole_table, r.bytes
                      FROM walbrook.records_%1$s r
                     WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
                     ORDER BY r.commit_lsn, r.commit_idx LIMIT $4) n
            $query$, id) INTO next
            USING last.commit_lsn, last.commit_idx, lease, most, last.swept_to, moment;
        EXIT WHEN NOT next.is_due OR taken > 0;
        RETURN QUERY SELECT * FROM walbrook.claim_again(
            settings, last, (batch_size - taken)::integer, greatest(wanted - taken, 0)::integer,
            lease, moment, until, holder);
        GET DIAGNOSTICS got = ROW_COUNT;
        taken := taken + got;
        most := greatest(least(wanted - taken, most), 0);
    END LOOP;
    IF next.rows > most THEN
        next.are_free := false;  -- it was looked at before some of what came back was taken
    END IF;
    IF NOT next.is_due THEN
        last.swept_to := moment;
    END IF;
    last.held_most := last.held_most + taken;
    FOR step IN 1..20 LOOP
        EXIT WHEN taken >= wanted OR most < 1 OR next.rows = 0;
        IF step = 1 AND next.are_free THEN
            RETURN QUERY EXECUTE format($query$
                WITH fresh AS MATERIALIZED (
                    SELECT r.commit_lsn, r.commit_idx, r.group_id, r.table_schema, r.table_name,
                           r.action, r.message
                      FROM walbrook.records_%1$s r
                     WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
                       AND (r.commit_lsn, r.commit_idx) <= ($3, $4)
                     ORDER BY r.commit_lsn, r.commit_idx),
                put AS (
                    INSERT INTO walbrook.in_flight_%1$s
                           (consumer, commit_lsn, commit_idx, group_id, lease_id, lease_until,
                            deliveries, whole_table, table_schema, table_name, holder)
                    SELECT %1$s, f.commit_lsn, f.commit_idx, f.group_id, $5, $6, 1, false,
                           f.table_schema, f.table_name, $7
                      FROM fresh f)
                SELECT concat('%1$s-', $5, '-', f.commit_lsn, '-', f.commit_idx), 1, $6,
                       f.commit_lsn, f.commit_idx, f.table_schema, f.table_name, f.action, f.message
                  FROM fresh f
                $query$, id)
                USING last.commit_lsn, last.commit_idx, next.commit_lsn, next.commit_idx, lease,
                      until, holder;
            INSERT INTO walbrook.claims AS c
                   (consumer, lease_id, commit_lsn, commit_idx, swept_to, swept_at, rows_most,
                    held_most, looked_at)
            VALUES (id, lease, next.commit_lsn, next.commit_idx, last.swept_to, last.swept_at,
                    last.rows_most + next.rows, last.held_most + next.rows, next.rows)
            RETURNING c.* INTO noted;
            EXIT;
        END IF;
        IF step > 1 THEN
            most := least(greatest(wanted - taken, 500), settings.max_in_flight + spare - last.rows_most);
            EXIT WHEN most < 1;
        END IF;
        RETURN QUERY SELECT * FROM walbrook.claim_fresh(
            settings, last, (wanted - taken)::integer, most::integer, lease, moment, until, holder);
        GET DIAGNOSTICS got = ROW_COUNT;
        taken := taken + got;
        SELECT c.* INTO noted FROM walbrook.claims c WHERE c.consumer = id AND c.lease_id = lease;
        EXIT WHEN NOT FOUND OR (noted.commit_lsn, noted.commit_idx) = (last.commit_lsn, last.commit_idx);
        last := noted;
        IF last.passed > passed THEN
            PERFORM walbrook.hold_back(id, lease, moment);
            passed := last.passed;
        END IF;
        EXIT WHEN last.looked_at < most;
    END LOOP;
    IF noted.lease_id IS NULL AND (taken > 0 OR is_swept) THEN
        INSERT INTO walbrook.claims (consumer, lease_id, commit_lsn, commit_idx, swept_to, swept_at,
                                     rows_most, held_most)
        VALUES (id, lease, last.commit_lsn, last.commit_idx, last.swept_to, last.swept_at,
                last.rows_most, last.held_most);
    END IF;
    IF noted.lease_id IS NOT NULL OR taken > 0 OR is_swept THEN
        DELETE FROM walbrook.claims c WHERE c.consumer = id AND c.lease_id < lease;
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.claim IS 'What walbrook.receive does once its arguments are checked.';

CREATE FUNCTION walbrook.check_receive(batch_size integer, visibility interval) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF batch_size IS NULL OR batch_size NOT BETWEEN 1 AND 10000 THEN
        RAISE EXCEPTION 'batch_size is %, but should be between 1 and 10000', coalesce(batch_size::text, 'null')
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'batch_size';
    END IF;
    PERFORM walbrook.check_interval('visibility', visibility, 1, 43200);
END
$$;

CREATE FUNCTION walbrook.receive(consumer text, batch_size integer DEFAULT 1,
                                 visibility interval DEFAULT NULL, wait interval DEFAULT '0',
                                 holder text DEFAULT NULL)
RETURNS SETOF walbrook.received
LANGUAGE plpgsql AS $$
DECLARE
    settings walbrook.pulls;
    ends     timestamptz;
    is_last  boolean;
    stood    record;
    stands   record;
    pause_s  float8 := 0.05;
BEGIN
    PERFORM walbrook.check_receive(batch_size, visibility);
    PERFORM walbrook.check_interval('wait', coalesce(wait, '0'), 0, 60);
    ends := clock_timestamp() + coalesce(wait, '0');
    LOOP
        -- Each time: somebody may pause it meanwhile.
        settings := walbrook.pull_consumer(receive.consumer, to_receive => true);
        is_last := clock_timestamp() >= ends;
        IF walbrook.claimable(settings.consumer) THEN
            IF is_last THEN
                RETURN QUERY SELECT * FROM walbrook.claim(settings.consumer, batch_size, visibility, left(holder, 200));
                RETURN;
            END IF;
            SELECT c.commit_lsn, c.commit_idx INTO stood FROM walbrook.claims c
             WHERE c.consumer = settings.consumer ORDER BY c.lease_id DESC LIMIT 1;
            -- Nothing may be locked while it waits: what a claim without an outcome has done is undone.
            -- Unless it passed messages over: then others, behind those, can be reached from there, and
            -- the caller asks again.
            BEGIN
                RETURN QUERY SELECT * FROM walbrook.claim(settings.consumer, batch_size, visibility, left(holder, 200));
                IF FOUND THEN
                    RETURN;
                END IF;
                SELECT c.commit_lsn, c.commit_idx INTO stands FROM walbrook.claims c
                 WHERE c.consumer = settings.consumer ORDER BY c.lease_id DESC LIMIT 1;
                IF (stands.commit_lsn, stands.commit_idx)
                   > (coalesce(stood.commit_lsn, '0/0'), coalesce(stood.commit_idx, -1)) THEN
                    RETURN;
                END IF;
                RAISE EXCEPTION USING ERRCODE = 'WB000';
            EXCEPTION WHEN SQLSTATE 'WB000' THEN
                -- Messages wait, and max_in_flight are handed out. A claim counts those: the pause
                -- before the next claim doubles, up to a second.
                pause_s := least(pause_s * 2, 1);
            END;
        ELSE
            pause_s := 0.05;
        END IF;
        EXIT WHEN is_last;
        PERFORM pg_sleep(least(pause_s, greatest(extract(epoch FROM ends - clock_timestamp())::float8, 0.001)));
    END LOOP;
END
$$;

COMMENT ON FUNCTION walbrook.receive IS 'Fetch up to batch_size messages of a pull consumer. They are the caller''s for visibility; walbrook.ack says that they are done. With wait, it waits so long for a first one; it may come back earlier without any, to be asked again.';

-- Many claimers at once, first come first: one pass, of which everyone has an equal share, until about
-- 64 MiB were handed out.
CREATE FUNCTION walbrook.receive_shared(consumer text, batch_sizes integer[], visibilities interval[],
                                        holders text[])
RETURNS TABLE (claimer integer, ack_id text, deliveries integer, lease_until timestamptz,
               commit_lsn pg_lsn, commit_idx bigint, table_schema text, table_name text,
               action text, message json)
LANGUAGE plpgsql AS $$
DECLARE
    settings walbrook.pulls;
    there    bigint;
    shares   integer[] := array_fill(0, ARRAY[cardinality(batch_sizes)]);
    turn     record;
    handed   walbrook.received[];
    bytes    bigint := 0;
BEGIN
    settings := walbrook.pull_consumer(receive_shared.consumer, to_receive => true);
    IF NOT walbrook.claimable(settings.consumer) THEN
        RETURN;
    END IF;
    there := walbrook.available(settings.consumer, (SELECT sum(b) FROM unnest(batch_sizes) b));
    -- The smallest wishes are met first; what they leave is shared by the others.
    FOR turn IN SELECT b.size, b.at, cardinality(batch_sizes) - row_number() OVER (ORDER BY b.size, b.at) + 1 AS others
                  FROM unnest(batch_sizes) WITH ORDINALITY b (size, at) ORDER BY 1, 2 LOOP
        shares[turn.at] := least(turn.size, there / turn.others);
        there := there - shares[turn.at];
    END LOOP;
    FOR turn IN SELECT b.size, b.at FROM unnest(batch_sizes) WITH ORDINALITY b (size, at) ORDER BY 2 LOOP
        IF there > 0 AND shares[turn.at] < turn.size THEN
            shares[turn.at] := shares[turn.at] + 1;
            there := there - 1;
        END IF;
        CONTINUE WHEN shares[turn.at] = 0;
        IF cardinality(batch_sizes) = 1 THEN
            RETURN QUERY SELECT turn.at::integer, c.*
                           FROM walbrook.claim(settings.consumer, shares[turn.at], visibilities[turn.at],
                                               left(holders[turn.at], 200)) c;
            RETURN;
        END IF;
        SELECT array_agg(c), bytes + coalesce(sum(octet_length(c.message::text)), 0) INTO handed, bytes
          FROM walbrook.claim(settings.consumer, shares[turn.at], visibilities[turn.at],
                              left(holders[turn.at], 200)) c;
        RETURN QUERY SELECT turn.at::integer, h.* FROM unnest(handed) h;
        EXIT WHEN bytes >= 67108864;  -- those who are left are served by the next pass
    END LOOP;
END
$$;

COMMENT ON FUNCTION walbrook.receive_shared IS 'What walbrook.receive does, for many claimers in one pass; claimer counts them from 1.';

-- ------------------------------------------------------------------------------------------------
-- What claimers say of what they were handed.

-- Why those that were not done were not: stale, or another consumer''s.
CREATE FUNCTION walbrook.refusals(consumer integer, ack_ids text[], gone_is_fine boolean,
                                  must_be_held boolean,
                                  OUT refused text[], OUT reasons text[])
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format($query$
        SELECT array_agg(w.ack_id), array_agg(w.why)
          FROM (SELECT g.ack_id,
                       CASE WHEN g.consumer <> %1$s THEN 'it is a lease of another consumer'
                            WHEN f.commit_lsn IS NULL THEN 'it is done: it was acknowledged or given up'
                            ELSE 'its lease is stale: it ran out or was given back, and the message goes to another'
                       END AS why
                  FROM walbrook.read_ack_ids($1) g
                  LEFT JOIN walbrook.in_flight_%1$s f
                    ON f.consumer = %1$s AND g.consumer = %1$s
                   AND f.commit_lsn = g.commit_lsn AND f.commit_idx = g.commit_idx
                 WHERE g.consumer <> %1$s
                    OR (f.lease_id IS DISTINCT FROM g.lease_id OR $3 AND f.lease_until IS NULL)
                       AND NOT ($2 AND f.commit_lsn IS NULL)) w
        $query$, refusals.consumer) INTO refused, reasons USING ack_ids, gone_is_fine, must_be_held;
    refused := coalesce(refused, '{}');
    reasons := coalesce(reasons, '{}');
END
$$;

CREATE FUNCTION walbrook.ack(consumer text, ack_ids text[],
                             OUT done integer, OUT refused text[], OUT reasons text[])
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    id      integer := (walbrook.pull_consumer(ack.consumer)).consumer;
    mine    tid[];
    lsns    pg_lsn[];
    idxs    bigint[];
    groups  bigint[];
    schemas text[];
    names   text[];
    wholes  boolean[];
BEGIN
    -- Locked in cursor order, so that two who say the same do not lock each other out.
    EXECUTE format($query$
        SELECT count(*), array_agg(f.ctid), array_agg(f.commit_lsn), array_agg(f.commit_idx),
               array_agg(f.group_id), array_agg(f.table_schema), array_agg(f.table_name),
               array_agg(f.whole_table)
          FROM walbrook.read_ack_ids($1) g,
               LATERAL (SELECT f.ctid, f.commit_lsn, f.commit_idx, f.group_id, f.table_schema,
                               f.table_name, f.whole_table
                          FROM walbrook.in_flight_%1$s f
                         WHERE f.consumer = %1$s AND f.commit_lsn = g.commit_lsn
                           AND f.commit_idx = g.commit_idx AND f.lease_id = g.lease_id
                         LIMIT 1 FOR UPDATE) f
         WHERE g.consumer = %1$s
        $query$, id) INTO done, mine, lsns, idxs, groups, schemas, names, wholes USING ack_ids;
    IF done > 0 THEN
        EXECUTE format($query$
            WITH gone AS (
                DELETE FROM walbrook.in_flight_%1$s f WHERE f.ctid = ANY ($1))
            DELETE FROM walbrook.records_%1$s r USING unnest($2, $3) m (commit_lsn, commit_idx)
             WHERE r.consumer = %1$s AND r.commit_lsn = m.commit_lsn AND r.commit_idx = m.commit_idx
            $query$, id) USING mine, lsns, idxs;
    END IF;
    refused := '{}';
    reasons := '{}';
    IF done < cardinality(ack_ids) THEN
        SELECT r.refused, r.reasons INTO refused, reasons FROM walbrook.refusals(id, ack_ids, true, false) r;
    END IF;
    IF done > 0 AND walbrook.wake_waiting(id, groups, schemas, names, wholes, in_claim => false) THEN
        PERFORM pg_notify('walbrook_pull', id::text);
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.ack IS 'Say that messages are done; they are gone then. Saying it again is fine. refused: those whose lease is no longer the caller''s, and reasons why.';

CREATE FUNCTION walbrook.nack(consumer text, ack_ids text[], delay interval DEFAULT NULL,
                              error text DEFAULT NULL,
                              OUT done integer, OUT refused text[], OUT reasons text[])
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    settings  walbrook.pulls := walbrook.pull_consumer(nack.consumer);
    id        integer := settings.consumer;
    mine      tid[];
    dead_lsns pg_lsn[];
    dead_idxs bigint[];
BEGIN
    PERFORM walbrook.check_interval('delay', delay, 0, 43200);
    EXECUTE format($query$
        SELECT array_agg(f.ctid)
          FROM walbrook.read_ack_ids($1) g,
               LATERAL (SELECT f.ctid
                          FROM walbrook.in_flight_%1$s f
                         WHERE f.consumer = %1$s AND f.commit_lsn = g.commit_lsn
                           AND f.commit_idx = g.commit_idx AND f.lease_id = g.lease_id
                         LIMIT 1 FOR NO KEY UPDATE) f
         WHERE g.consumer = %1$s
        $query$, id) INTO mine USING ack_ids;
    EXECUTE format($query$
        WITH given_back AS (
            UPDATE walbrook.in_flight_%1$s f
               SET lease_id = NULL, lease_until = NULL, error = $3,
                   due_at = clock_timestamp() + coalesce($2, make_interval(secs =>
                       least($4 * 2.0 ^ least(f.deliveries - 1, 40), $5) / 1000 * (1 + random() / 10)))
             WHERE f.ctid = ANY ($1)
            RETURNING f.commit_lsn, f.commit_idx, f.deliveries)
        SELECT count(*), array_agg(commit_lsn) FILTER (WHERE deliveries >= $6),
               array_agg(commit_idx) FILTER (WHERE deliveries >= $6)
          FROM given_back
        $query$, id) INTO done, dead_lsns, dead_idxs
      USING mine, delay, left(error, 2000), settings.retry_first_ms, settings.retry_max_ms,
            settings.max_deliveries;
    IF dead_lsns IS NOT NULL THEN
        PERFORM walbrook.bury_records(id, dead_lsns, dead_idxs, in_claim => false);
    END IF;
    refused := '{}';
    reasons := '{}';
    IF done < cardinality(ack_ids) THEN
        SELECT r.refused, r.reasons INTO refused, reasons FROM walbrook.refusals(id, ack_ids, false, false) r;
    END IF;
    IF done > 0 THEN
        PERFORM pg_notify('walbrook_pull', id::text);
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.nack IS 'Give messages back, to be handed out again after delay; without one the pause doubles each time. After max_deliveries they become dead letters.';

CREATE FUNCTION walbrook.extend(consumer text, ack_ids text[], by interval,
                                OUT done integer, OUT refused text[], OUT reasons text[])
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    id   integer := (walbrook.pull_consumer(extend.consumer)).consumer;
    mine tid[];
BEGIN
    IF by IS NULL THEN
        RAISE EXCEPTION 'by is null, but should say by how long'
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'by';
    END IF;
    PERFORM walbrook.check_interval('by', by, 1, 43200);
    EXECUTE format($query$
        SELECT array_agg(f.ctid)
          FROM walbrook.read_ack_ids($1) g,
               LATERAL (SELECT f.ctid
                          FROM walbrook.in_flight_%1$s f
                         WHERE f.consumer = %1$s AND f.commit_lsn = g.commit_lsn
                           AND f.commit_idx = g.commit_idx AND f.lease_id = g.lease_id
                           AND f.lease_until IS NOT NULL
                         LIMIT 1 FOR NO KEY UPDATE) f
         WHERE g.consumer = %1$s
        $query$, id) INTO mine USING ack_ids;
    EXECUTE format($query$
        UPDATE walbrook.in_flight_%1$s f
           SET lease_until = least(greatest(f.lease_until, clock_timestamp()) + $2,
                                   clock_timestamp() + interval '12 hours')
         WHERE f.ctid = ANY ($1)
        $query$, id) USING mine, by;
    GET DIAGNOSTICS done = ROW_COUNT;
    refused := '{}';
    reasons := '{}';
    IF done < cardinality(ack_ids) THEN
        SELECT r.refused, r.reasons INTO refused, reasons FROM walbrook.refusals(id, ack_ids, false, true) r;
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.extend IS 'Keep messages for longer: their deadline moves by this much, at most to twelve hours from now.';

-- For whoever claimed for a claimer that was gone before it could be told: as if it had not been.
CREATE FUNCTION walbrook.give_back(consumer text, ack_ids text[]) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    id   integer := (walbrook.pull_consumer(give_back.consumer)).consumer;
    mine tid[];
    done integer;
BEGIN
    EXECUTE format($query$
        SELECT array_agg(f.ctid)
          FROM walbrook.read_ack_ids($1) g,
               LATERAL (SELECT f.ctid
                          FROM walbrook.in_flight_%1$s f
                         WHERE f.consumer = %1$s AND f.commit_lsn = g.commit_lsn
                           AND f.commit_idx = g.commit_idx AND f.lease_id = g.lease_id
                         LIMIT 1 FOR NO KEY UPDATE) f
         WHERE g.consumer = %1$s
        $query$, id) INTO mine USING ack_ids;
    EXECUTE format($query$
        UPDATE walbrook.in_flight_%1$s f
           SET lease_id = NULL, lease_until = NULL, deliveries = f.deliveries - 1,
               due_at = clock_timestamp()
         WHERE f.ctid = ANY ($1)
        $query$, id) USING mine;
    GET DIAGNOSTICS done = ROW_COUNT;
    PERFORM pg_notify('walbrook_pull', id::text);
    RETURN done;
END
$$;

-- ------------------------------------------------------------------------------------------------
-- Dropping on purpose: never in silence. Of each run of messages that goes, the last one's place is
-- taken by a gap, which the consumer gets like any message and walbrook.gaps lists.

CREATE FUNCTION walbrook.gap_message(template text, lsn pg_lsn, idx bigint, first text, past text, reason text)
RETURNS json
LANGUAGE sql STABLE AS $$
    SELECT replace(replace(replace(replace(replace(replace(replace(replace(template,
           '7777777777777777777', (lsn - '0/0')::text),
           '666666666666', idx::text),
           '2001-02-03T04:05:06.789012Z',
           to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')),
           '981173106789012', floor(extract(epoch FROM now()) * 1000000)::bigint::text),
           '981173106789', floor(extract(epoch FROM now()) * 1000)::bigint::text),
           'walbrook:from', first), 'walbrook:to', past), 'walbrook:reason', reason)::json
$$;

-- Drops from the oldest that nobody holds: so many, or so many bytes, or all that were stored before.
-- The caller holds the lock of walbrook.pulls; one call looks at no more than 20000 of either kind.
CREATE FUNCTION walbrook.drop_records(settings walbrook.pulls, last walbrook.claims, messages bigint,
                                      bytes bigint, before timestamptz, reason text,
                                      OUT dropped bigint, OUT dropped_bytes bigint)
LANGUAGE plpgsql
-- Not as a claim has them, which may call it: many meet many here.
SET enable_seqscan = on SET enable_bitmapscan = on SET enable_hashjoin = on SET enable_mergejoin = on
AS $$
DECLARE
    id      integer := settings.consumer;
    groups  bigint[];
    schemas text[];
    names   text[];
    wholes  boolean[];
    what    text;
BEGIN
    EXECUTE format($query$
        WITH idle AS MATERIALIZED (
            SELECT f.commit_lsn, f.commit_idx FROM walbrook.in_flight_%1$s f
             WHERE f.consumer = %1$s AND f.lease_until IS NULL
             ORDER BY f.commit_lsn, f.commit_idx LIMIT 20000 FOR UPDATE SKIP LOCKED),
        runs AS (
            SELECT f.commit_lsn, f.commit_idx, i.commit_lsn IS NOT NULL AS is_idle,
                   count(*) FILTER (WHERE i.commit_lsn IS NULL) OVER (ORDER BY f.commit_lsn, f.commit_idx) AS run
              FROM walbrook.in_flight_%1$s f
              LEFT JOIN idle i ON i.commit_lsn = f.commit_lsn AND i.commit_idx = f.commit_idx
             WHERE f.consumer = %1$s),
        unheld AS (
            SELECT r.commit_lsn, r.commit_idx, r.bytes, r.stored_at, r.action, u.run
              FROM runs u
              JOIN walbrook.records_%1$s r
                ON r.consumer = %1$s AND r.commit_lsn = u.commit_lsn AND r.commit_idx = u.commit_idx
             WHERE u.is_idle
             UNION ALL
            (SELECT r.commit_lsn, r.commit_idx, r.bytes, r.stored_at, r.action, -1
               FROM walbrook.records_%1$s r
              WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
              ORDER BY r.commit_lsn, r.commit_idx LIMIT 20000)),
        counted AS (
            SELECT u.*, count(*) FILTER (WHERE u.action <> 'gap') OVER place AS n,
                   sum(u.bytes) OVER place - u.bytes AS bytes_before
              FROM unheld u WINDOW place AS (ORDER BY u.commit_lsn, u.commit_idx)),
        doomed AS MATERIALIZED (
            SELECT c.*,
                   row_number() OVER (PARTITION BY c.run ORDER BY c.commit_lsn, c.commit_idx) AS nth,
                   row_number() OVER (PARTITION BY c.run ORDER BY c.commit_lsn DESC, c.commit_idx DESC) AS nth_last,
                   bool_or(c.action <> 'gap') OVER (PARTITION BY c.run) AS has_changes
              FROM counted c
             WHERE c.n <= $3 OR c.bytes_before < $4 OR c.stored_at < $5),
        gaps AS MATERIALIZED (
            SELECT coalesce(g.from_lsn, a.commit_lsn) AS from_lsn, coalesce(g.from_idx, a.commit_idx) AS from_idx,
                   z.commit_lsn, z.commit_idx, c.source, c.name
              FROM doomed a
              JOIN doomed z ON z.run = a.run AND z.nth_last = 1
              JOIN walbrook.consumers c ON c.id = %1$s
              LEFT JOIN walbrook.gaps g
                ON a.action = 'gap' AND g.source = c.source AND g.consumer = c.name
               AND g.to_lsn = a.commit_lsn AND g.to_idx = a.commit_idx + 1
             WHERE a.nth = 1 AND a.has_changes),
        noted AS (
            INSERT INTO walbrook.gaps AS g
                   (source, consumer, from_lsn, from_idx, to_lsn, to_idx, reason, told_at)
            SELECT source, name, from_lsn, from_idx, commit_lsn, commit_idx + 1, $6, clock_timestamp()
              FROM gaps
                ON CONFLICT ON CONSTRAINT gaps_source_consumer_from_lsn_from_idx_key
                DO UPDATE SET to_lsn = excluded.to_lsn, to_idx = excluded.to_idx,
                              reason = excluded.reason, noted_at = excluded.noted_at,
                              told_at = excluded.told_at),
        erased AS (
            DELETE FROM walbrook.records_%1$s r USING doomed d
             WHERE r.consumer = %1$s AND r.commit_lsn = d.commit_lsn AND r.commit_idx = d.commit_idx
               AND d.has_changes AND d.nth_last > 1),
        told AS (
            UPDATE walbrook.records_%1$s r
               SET action = 'gap', group_id = NULL, whole_table = false, table_schema = '',
                   table_name = '', commit_timestamp = clock_timestamp(), stored_at = clock_timestamp(),
                   bytes = length($7),
                   message = walbrook.gap_message(
                       $7, g.commit_lsn, g.commit_idx, g.from_lsn || ':' || g.from_idx,
                       g.commit_lsn || ':' || g.commit_idx + 1, $6)
              FROM gaps g
             WHERE r.consumer = %1$s AND r.commit_lsn = g.commit_lsn AND r.commit_idx = g.commit_idx),
        let_go AS (
            DELETE FROM walbrook.in_flight_%1$s f USING doomed d
             WHERE f.consumer = %1$s AND f.commit_lsn = d.commit_lsn AND f.commit_idx = d.commit_idx
               AND d.has_changes AND d.nth_last > 1
            RETURNING f.group_id, f.table_schema, f.table_name, f.whole_table),
        kept AS (
            UPDATE walbrook.in_flight_%1$s f
               SET group_id = NULL, whole_table = false, lease_id = NULL, deliveries = 0, error = NULL,
                   due_at = clock_timestamp()
              FROM doomed d
             WHERE f.consumer = %1$s AND f.commit_lsn = d.commit_lsn AND f.commit_idx = d.commit_idx
               AND d.has_changes AND d.nth_last = 1
            RETURNING f.commit_lsn, f.commit_idx),
        freed AS (
            SELECT group_id, table_schema, table_name, whole_table FROM let_go
             UNION ALL
            SELECT f.group_id, f.table_schema, f.table_name, f.whole_table
              FROM kept k
              JOIN walbrook.in_flight_%1$s f
                ON f.consumer = %1$s AND f.commit_lsn = k.commit_lsn AND f.commit_idx = k.commit_idx)
        SELECT (SELECT count(*) - count(*) FILTER (WHERE nth_last = 1) FROM doomed WHERE has_changes),
               (SELECT coalesce(sum(d.bytes), 0) FROM doomed d WHERE d.has_changes),
               array_agg(group_id), array_agg(table_schema), array_agg(table_name), array_agg(whole_table)
          FROM freed
        $query$, id)
       INTO dropped, dropped_bytes, groups, schemas, names, wholes
      USING last.commit_lsn, last.commit_idx, messages, bytes, before, reason, settings.gap_message;
    IF dropped_bytes = 0 THEN
        RETURN;
    END IF;
    IF groups IS NOT NULL THEN
        PERFORM walbrook.wake_waiting(id, groups, schemas, names, wholes, in_claim => true);
    END IF;
    what := CASE reason WHEN 'ttl' THEN format('messages that were stored for more than %s s', settings.ttl_s)
                        ELSE 'the oldest messages, because its queue is as full as it may be' END;
    INSERT INTO walbrook.health_events (source, consumer, kind, severity, what, fix)
    SELECT c.source, c.name, 'records_dropped', 'warning',
           format('messages of %s are being dropped: %s', c.name, what),
           'let it fetch and acknowledge faster, or raise max_messages, max_bytes or ttl_s of its '
           'destination; walbrook.gaps lists what is gone'
      FROM walbrook.consumers c WHERE c.id = settings.consumer
        ON CONFLICT (source, coalesce(consumer, ''), kind) WHERE resolved_at IS NULL
        DO UPDATE SET what = excluded.what, seen_at = clock_timestamp();
END
$$;

-- A minute after the last one, nothing is being dropped any more.
CREATE FUNCTION walbrook.nothing_dropped(id integer) RETURNS void
LANGUAGE sql AS $$
    UPDATE walbrook.health_events e SET resolved_at = clock_timestamp()
      FROM walbrook.consumers c
     WHERE c.id = nothing_dropped.id AND e.source = c.source AND e.consumer = c.name
       AND e.kind = 'records_dropped' AND e.resolved_at IS NULL
       AND e.seen_at < clock_timestamp() - interval '1 minute'
$$;

-- The same for what is older than ttl_s; what somebody holds is left to him.
CREATE FUNCTION walbrook.drop_aged(settings walbrook.pulls, last walbrook.claims) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    before timestamptz := clock_timestamp() - make_interval(secs => settings.ttl_s);
    is_aged boolean;
BEGIN
    EXECUTE format($query$
        SELECT coalesce((SELECT r.stored_at < $3 AND r.action <> 'gap' FROM walbrook.records_%1$s r
                          WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
                          ORDER BY r.commit_lsn, r.commit_idx LIMIT 1), false)
            OR EXISTS (SELECT FROM walbrook.in_flight_%1$s f
                         JOIN walbrook.records_%1$s r USING (consumer, commit_lsn, commit_idx)
                        WHERE f.consumer = %1$s AND f.lease_until IS NULL
                          AND r.stored_at < $3 AND r.action <> 'gap')
        $query$, settings.consumer) INTO is_aged USING last.commit_lsn, last.commit_idx, before;
    IF is_aged THEN
        PERFORM walbrook.drop_records(settings, last, 0, 0, before, 'ttl');
    ELSE
        PERFORM walbrook.nothing_dropped(settings.consumer);
    END IF;
END
$$;

-- After so many were stored: keep the queue within its bounds. In the transaction that stored them.
CREATE FUNCTION walbrook.keep_bounds(id integer, messages bigint, bytes bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    settings walbrook.pulls;
    last     walbrook.claims;
    most     record;
    gone     record;
BEGIN
    SELECT p.* INTO settings FROM walbrook.pulls p WHERE p.consumer = keep_bounds.id;
    UPDATE walbrook.stored s
       SET messages_most = s.messages_most + keep_bounds.messages,
           bytes_most = s.bytes_most + keep_bounds.bytes
     WHERE s.consumer = keep_bounds.id RETURNING s.messages_most, s.bytes_most INTO most;
    IF NOT (settings.ttl_s IS NOT NULL OR most.messages_most > settings.max_messages
            OR most.bytes_most > settings.max_bytes) IS TRUE THEN
        IF settings.max_messages IS NOT NULL OR settings.max_bytes IS NOT NULL THEN
            PERFORM walbrook.nothing_dropped(id);
        END IF;
        RETURN;
    END IF;
    PERFORM FROM walbrook.pulls p WHERE p.consumer = keep_bounds.id FOR NO KEY UPDATE;
    SELECT c.* INTO last FROM walbrook.claims c
     WHERE c.consumer = keep_bounds.id ORDER BY c.lease_id DESC LIMIT 1;
    IF NOT FOUND THEN
        last := ROW(id, 0, '0/0', -1, '-infinity', '-infinity', 0, 0, 0, 0);
    END IF;
    IF settings.ttl_s IS NOT NULL THEN
        PERFORM walbrook.drop_aged(settings, last);
    END IF;
    FOR step IN 1..20 LOOP
        EXECUTE format('SELECT count(*) AS messages_most, coalesce(sum(r.bytes), 0) AS bytes_most '
                       'FROM walbrook.records_%s r', id) INTO most;
        EXIT WHEN NOT (most.messages_most > settings.max_messages
                       OR most.bytes_most > settings.max_bytes) IS TRUE;
        -- A little more than must be, so that the next few need no counting; and room for the gap.
        SELECT d.* INTO gone FROM walbrook.drop_records(settings, last,
            CASE WHEN most.messages_most > settings.max_messages
                 THEN most.messages_most - settings.max_messages + settings.max_messages / 20 + 1 ELSE 0 END,
            CASE WHEN most.bytes_most > settings.max_bytes
                 THEN most.bytes_most - settings.max_bytes + settings.max_bytes / 20
                      + length(settings.gap_message) ELSE 0 END,
            '-infinity', 'cap') d;
        EXIT WHEN gone.dropped = 0;
    END LOOP;
    UPDATE walbrook.stored s SET messages_most = most.messages_most, bytes_most = most.bytes_most
     WHERE s.consumer = keep_bounds.id;
END
$$;

-- ------------------------------------------------------------------------------------------------
-- For operators: who holds what; a dead letter back into the queue; the queue moved back.

CREATE VIEW walbrook.leases AS
SELECT c.source, c.name AS consumer, h.commit_lsn || ':' || h.commit_idx AS cursor, h.lease_id,
       h.holder, h.lease_until, h.deliveries, h.lease_until <= clock_timestamp() AS expired
  FROM (SELECT f.consumer, f.commit_lsn, f.commit_idx, f.lease_id, f.holder, f.lease_until, f.deliveries
          FROM walbrook.in_flight f WHERE f.lease_until IS NOT NULL
         UNION ALL
        SELECT e.consumer, e.commit_lsn, e.commit_idx, e.lease_id, e.holder, e.lease_until, e.deliveries
          FROM walbrook.events e WHERE e.lease_until IS NOT NULL) h
  JOIN walbrook.consumers c ON c.id = h.consumer;

COMMENT ON VIEW walbrook.leases IS 'Who holds which message, until when; expired: nobody has taken it since.';

CREATE FUNCTION walbrook.requeue_record(event json) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    -- Without the message, which is text in there.
    record  walbrook.records := json_populate_record(NULL::walbrook.records, event);
    stored  walbrook.stored;
    last    walbrook.claims;
    is_next boolean;
    known   boolean;
BEGIN
    -- In this order everywhere: who stores locks the first and may then want the second.
    SELECT s.* INTO stored FROM walbrook.stored s WHERE s.consumer = record.consumer FOR UPDATE;
    PERFORM FROM walbrook.pulls p WHERE p.consumer = record.consumer FOR NO KEY UPDATE;
    IF NOT FOUND OR stored.consumer IS NULL OR event -> 'message' IS NULL THEN
        RAISE EXCEPTION 'this is no message of a pull consumer that there is now'
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF (record.commit_lsn, record.commit_idx) > (stored.commit_lsn, stored.commit_idx) THEN
        IF EXISTS (SELECT FROM walbrook.consumers c
                    WHERE c.id = record.consumer
                      AND (c.cursor_lsn, c.cursor_idx) <= (record.commit_lsn, record.commit_idx)) THEN
            RETURN false;  -- the consumer was moved back: it comes again by itself
        END IF;
        UPDATE walbrook.stored s SET commit_lsn = record.commit_lsn, commit_idx = record.commit_idx
         WHERE s.consumer = record.consumer;
    END IF;
    SELECT c.* INTO last FROM walbrook.claims c
     WHERE c.consumer = record.consumer ORDER BY c.lease_id DESC LIMIT 1;
    -- Ahead of the last claim it is as one that nobody was handed yet: the next comes by it.
    is_next := ((record.commit_lsn, record.commit_idx) > (last.commit_lsn, last.commit_idx)) IS NOT FALSE;
    EXECUTE format($query$
        WITH put AS (
            INSERT INTO walbrook.records_%1$s
                   (consumer, commit_lsn, commit_idx, group_id, whole_table, bytes, commit_timestamp,
                    table_schema, table_name, action, message)
            VALUES (%1$s, $1.commit_lsn, $1.commit_idx, $1.group_id, $1.whole_table, $1.bytes,
                    $1.commit_timestamp, $1.table_schema, $1.table_name, $1.action, $2)
                ON CONFLICT DO NOTHING RETURNING 1),
        flown AS (
            INSERT INTO walbrook.in_flight_%1$s
                   (consumer, commit_lsn, commit_idx, group_id, due_at, deliveries, whole_table,
                    table_schema, table_name)
            SELECT %1$s, $1.commit_lsn, $1.commit_idx, $1.group_id, clock_timestamp(), 0, $1.whole_table,
                   $1.table_schema, $1.table_name
              FROM put WHERE NOT $3)
        SELECT EXISTS (SELECT FROM put)
        $query$, record.consumer) INTO known USING record, (event ->> 'message')::json, is_next;
    PERFORM pg_notify('walbrook_pull', record.consumer::text);
    RETURN known;
END
$$;

COMMENT ON FUNCTION walbrook.requeue_record IS 'Put the event of a pull consumer''s dead letter back into its queue, with its deliveries counted anew. False: it is there, or comes again by itself because the consumer was moved back.';

CREATE FUNCTION walbrook.forget_records(id integer, lsn pg_lsn, idx bigint, for_good boolean DEFAULT false)
RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    last  walbrook.claims;
    ends  walbrook.stored;
    count bigint;
BEGIN
    -- In this order everywhere: who stores locks the first and may then want the second.
    SELECT s.* INTO ends FROM walbrook.stored s WHERE s.consumer = forget_records.id FOR UPDATE;
    PERFORM FROM walbrook.pulls p WHERE p.consumer = forget_records.id FOR UPDATE;
    -- In cursor order, as those who acknowledge lock them.
    EXECUTE format('SELECT count(*) FROM (SELECT FROM walbrook.in_flight_%1$s f WHERE f.consumer = %1$s '
                   'AND (f.commit_lsn, f.commit_idx) >= ($1, $2) '
                   'ORDER BY f.commit_lsn, f.commit_idx FOR UPDATE) f', id) INTO count USING lsn, idx;
    EXECUTE format('DELETE FROM walbrook.in_flight_%1$s f WHERE f.consumer = %1$s '
                   'AND (f.commit_lsn, f.commit_idx) >= ($1, $2)', id) USING lsn, idx;
    EXECUTE format('DELETE FROM walbrook.records_%1$s r WHERE r.consumer = %1$s '
                   'AND (r.commit_lsn, r.commit_idx) >= ($1, $2)', id) USING lsn, idx;
    GET DIAGNOSTICS count = ROW_COUNT;
    EXECUTE format('UPDATE walbrook.in_flight_%1$s f SET due_at = clock_timestamp() WHERE f.consumer = %1$s '
                   'AND f.lease_until IS NULL AND f.due_at IS NULL', id);
    SELECT c.* INTO last FROM walbrook.claims c WHERE c.consumer = id ORDER BY c.lease_id DESC LIMIT 1;
    -- Claims go on behind what is gone for good, or from where it comes again.
    IF NOT for_good THEN
        ends.commit_lsn := lsn;
        ends.commit_idx := idx - 1;
    END IF;
    IF for_good OR (last.commit_lsn, last.commit_idx) >= (lsn, idx) THEN
        INSERT INTO walbrook.claims (consumer, lease_id, commit_lsn, commit_idx)
        VALUES (id, nextval('walbrook.lease_ids'), ends.commit_lsn, ends.commit_idx);
        DELETE FROM walbrook.claims c WHERE c.consumer = id AND c.lease_id <= last.lease_id;
    END IF;
    UPDATE walbrook.stored s SET commit_lsn = ends.commit_lsn, commit_idx = ends.commit_idx
     WHERE s.consumer = id AND (s.commit_lsn, s.commit_idx) >= (lsn, idx);
    RETURN count;
END
$$;

COMMENT ON FUNCTION walbrook.forget_records IS 'Take everything from a cursor on out of a pull consumer''s queue, so that it can be stored again, or for good; leases of it end. For when its cursor is moved.';
