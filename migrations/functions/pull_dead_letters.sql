-- Pull consumers: messages that become dead letters, and come back.

-- The message goes in as text: a \u0000 in it, which json keeps and nothing can read, would make the
-- other members unreadable too; and its numbers stay what they were.
CREATE OR REPLACE FUNCTION walbrook.record_as_event(r walbrook.pull_messages) RETURNS json
LANGUAGE sql STABLE AS $$
    SELECT json_build_object(
        'consumer', r.consumer, 'commit_lsn', r.commit_lsn, 'commit_idx', r.commit_idx,
        'group_id', r.group_id, 'whole_table', r.whole_table, 'bytes', r.bytes,
        'commit_timestamp', r.commit_timestamp, 'table_schema', r.table_schema,
        'table_name', r.table_name, 'action', r.action, 'message', r.message::text)
$$;

-- Give these up: each becomes a dead letter, and its group goes on.
CREATE OR REPLACE FUNCTION walbrook.bury_records(consumer integer, lsns pg_lsn[], idxs bigint[], in_claim boolean)
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
          JOIN walbrook.pull_in_flight_%1$s f
            ON f.consumer = %1$s AND f.commit_lsn = u.lsn AND f.commit_idx = u.idx
          JOIN walbrook.pull_messages_%1$s r
            ON r.consumer = %1$s AND r.commit_lsn = u.lsn AND r.commit_idx = u.idx,
               walbrook.consumers c
         WHERE c.id = %1$s
            ON CONFLICT ON CONSTRAINT dead_letters_source_consumer_commit_lsn_commit_idx_key
            DO UPDATE SET kind = excluded.kind, error = excluded.error, event = excluded.event,
                          deliveries = excluded.deliveries, dead_at = excluded.dead_at
        $query$, bury_records.consumer) USING lsns, idxs;
    -- Not in walbrook.consumers: a worker's transaction that stays open would hold up who settles.
    WITH counted AS (
        DELETE FROM walbrook.pull_dead_counts b USING (
            SELECT k.id FROM walbrook.pull_dead_counts k
             WHERE k.consumer = bury_records.consumer FOR UPDATE SKIP LOCKED) k
         WHERE b.id = k.id RETURNING b.messages)
    INSERT INTO walbrook.pull_dead_counts (consumer, messages)
    SELECT bury_records.consumer, cardinality(lsns) + coalesce(sum(c.messages), 0) FROM counted c;
    EXECUTE format($query$
        WITH gone AS (
            DELETE FROM walbrook.pull_in_flight_%1$s f USING unnest($1, $2) u (lsn, idx)
             WHERE f.consumer = %1$s AND f.commit_lsn = u.lsn AND f.commit_idx = u.idx
            RETURNING f.commit_lsn, f.commit_idx, f.group_id, f.table_schema, f.table_name, f.whole_table),
        erased AS (
            DELETE FROM walbrook.pull_messages_%1$s r USING gone
             WHERE r.consumer = %1$s AND r.commit_lsn = gone.commit_lsn AND r.commit_idx = gone.commit_idx)
        SELECT array_agg(group_id), array_agg(table_schema), array_agg(table_name), array_agg(whole_table)
          FROM gone
        $query$, bury_records.consumer) INTO groups, schemas, names, wholes USING lsns, idxs;
    PERFORM walbrook.wake_waiting(bury_records.consumer, groups, schemas, names, wholes, in_claim);
END
$$;

CREATE OR REPLACE FUNCTION walbrook.dead_ever(c walbrook.consumers) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT c.dead + coalesce((SELECT sum(b.messages) FROM walbrook.pull_dead_counts b WHERE b.consumer = c.id), 0)::bigint
$$;

COMMENT ON FUNCTION walbrook.dead_ever IS 'How many changes have ever become dead letters of this consumer.';

CREATE OR REPLACE FUNCTION walbrook.requeue_record(event json) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    -- Without the message, which is text in there.
    record  walbrook.pull_messages := json_populate_record(NULL::walbrook.pull_messages, event);
    stored  walbrook.pull_positions;
    last    walbrook.pull_claims;
    is_next boolean;
    known   boolean;
BEGIN
    -- In this order everywhere: who stores locks the first and may then want the second.
    SELECT s.* INTO stored FROM walbrook.pull_positions s WHERE s.consumer = record.consumer FOR UPDATE;
    PERFORM FROM walbrook.pull_settings p WHERE p.consumer = record.consumer FOR NO KEY UPDATE;
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
        UPDATE walbrook.pull_positions s SET commit_lsn = record.commit_lsn, commit_idx = record.commit_idx
         WHERE s.consumer = record.consumer;
    END IF;
    SELECT c.* INTO last FROM walbrook.pull_claims c
     WHERE c.consumer = record.consumer ORDER BY c.lease_id DESC LIMIT 1;
    -- Ahead of the last claim it is as one that was not handed out yet: the next comes by it.
    is_next := ((record.commit_lsn, record.commit_idx) > (last.commit_lsn, last.commit_idx)) IS NOT FALSE;
    EXECUTE format($query$
        WITH put AS (
            INSERT INTO walbrook.pull_messages_%1$s
                   (consumer, commit_lsn, commit_idx, group_id, whole_table, bytes, commit_timestamp,
                    table_schema, table_name, action, message)
            VALUES (%1$s, $1.commit_lsn, $1.commit_idx, $1.group_id, $1.whole_table, $1.bytes,
                    $1.commit_timestamp, $1.table_schema, $1.table_name, $1.action, $2)
                ON CONFLICT DO NOTHING RETURNING 1),
        flown AS (
            INSERT INTO walbrook.pull_in_flight_%1$s
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

COMMENT ON FUNCTION walbrook.requeue_record IS 'Put the event of a pull consumer''s dead letter back into its queue, with its deliveries counted from zero. False: it is there, or comes again by itself because the consumer was moved back.';

CREATE OR REPLACE FUNCTION walbrook.forget_records(id integer, lsn pg_lsn, idx bigint, for_good boolean DEFAULT false)
RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    last  walbrook.pull_claims;
    ends  walbrook.pull_positions;
    count bigint;
BEGIN
    -- In this order everywhere: who stores locks the first and may then want the second.
    SELECT s.* INTO ends FROM walbrook.pull_positions s WHERE s.consumer = forget_records.id FOR UPDATE;
    PERFORM FROM walbrook.pull_settings p WHERE p.consumer = forget_records.id FOR UPDATE;
    -- In cursor order, as those who acknowledge lock them.
    EXECUTE format('SELECT count(*) FROM (SELECT FROM walbrook.pull_in_flight_%1$s f WHERE f.consumer = %1$s '
                   'AND (f.commit_lsn, f.commit_idx) >= ($1, $2) '
                   'ORDER BY f.commit_lsn, f.commit_idx FOR UPDATE) f', id) INTO count USING lsn, idx;
    EXECUTE format('DELETE FROM walbrook.pull_in_flight_%1$s f WHERE f.consumer = %1$s '
                   'AND (f.commit_lsn, f.commit_idx) >= ($1, $2)', id) USING lsn, idx;
    EXECUTE format('DELETE FROM walbrook.pull_messages_%1$s r WHERE r.consumer = %1$s '
                   'AND (r.commit_lsn, r.commit_idx) >= ($1, $2)', id) USING lsn, idx;
    GET DIAGNOSTICS count = ROW_COUNT;
    EXECUTE format('UPDATE walbrook.pull_in_flight_%1$s f SET due_at = clock_timestamp() WHERE f.consumer = %1$s '
                   'AND f.lease_until IS NULL AND f.due_at IS NULL', id);
    SELECT c.* INTO last FROM walbrook.pull_claims c WHERE c.consumer = id ORDER BY c.lease_id DESC LIMIT 1;
    -- Claims go on behind what is gone for good, or from where it comes again.
    IF NOT for_good THEN
        ends.commit_lsn := lsn;
        ends.commit_idx := idx - 1;
    END IF;
    IF for_good OR (last.commit_lsn, last.commit_idx) >= (lsn, idx) THEN
        INSERT INTO walbrook.pull_claims (consumer, lease_id, commit_lsn, commit_idx)
        VALUES (id, nextval('walbrook.lease_ids'), ends.commit_lsn, ends.commit_idx);
        DELETE FROM walbrook.pull_claims c WHERE c.consumer = id AND c.lease_id <= last.lease_id;
    END IF;
    UPDATE walbrook.pull_positions s SET commit_lsn = ends.commit_lsn, commit_idx = ends.commit_idx
     WHERE s.consumer = id AND (s.commit_lsn, s.commit_idx) >= (lsn, idx);
    RETURN count;
END
$$;

COMMENT ON FUNCTION walbrook.forget_records IS 'Take everything from a cursor on out of a pull consumer''s queue, so that it can be stored again, or for good; leases of it end. For when its cursor is moved.';
