-- The retry queue of a push consumer: its partitions, which message of a group is due, what becomes a dead letter.

CREATE OR REPLACE FUNCTION walbrook.make_queue(consumer integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF to_regclass(format('walbrook.events_%s', make_queue.consumer)) IS NULL THEN
        EXECUTE format('CREATE TABLE walbrook.events_%s PARTITION OF walbrook.events FOR VALUES IN (%s)',
                       make_queue.consumer, make_queue.consumer);
    END IF;
    IF to_regclass(format('walbrook.pull_messages_%s', make_queue.consumer)) IS NULL THEN
        EXECUTE format('CREATE TABLE walbrook.pull_messages_%s PARTITION OF walbrook.pull_messages FOR VALUES IN (%s) '
                       'WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000)',
                       make_queue.consumer, make_queue.consumer);
    END IF;
    IF to_regclass(format('walbrook.pull_in_flight_%s', make_queue.consumer)) IS NULL THEN
        EXECUTE format('CREATE TABLE walbrook.pull_in_flight_%s PARTITION OF walbrook.pull_in_flight FOR VALUES IN (%s) '
                       'WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, '
                       'autovacuum_vacuum_cost_delay = 0)',
                       make_queue.consumer, make_queue.consumer);
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.make_queue IS 'Make the partitions of a consumer''s queue; done when it is first configured.';

-- With a consumer goes what waits for it.
CREATE OR REPLACE FUNCTION walbrook.drop_queue() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('DROP TABLE IF EXISTS walbrook.events_%s, walbrook.pull_messages_%s, walbrook.pull_in_flight_%s',
                   OLD.id, OLD.id, OLD.id);
    RETURN NULL;
END
$$;

CREATE OR REPLACE TRIGGER drop_queue AFTER DELETE ON walbrook.consumers
    FOR EACH ROW EXECUTE FUNCTION walbrook.drop_queue();

-- The first row of each group is due. Called with the consumer's row in walbrook.consumers locked, by
-- the transaction that added or took rows of these groups; without groups, for all of them.
CREATE OR REPLACE FUNCTION walbrook.promote(consumer integer, groups bigint[] DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF groups IS NOT NULL AND NOT EXISTS (
        SELECT FROM walbrook.events e WHERE e.consumer = promote.consumer AND e.whole_table)
    THEN
        UPDATE walbrook.events e SET due_at = clock_timestamp()
          FROM unnest(promote.groups) g
         CROSS JOIN LATERAL (
               SELECT f.commit_lsn, f.commit_idx, f.due_at FROM walbrook.events f
                WHERE f.consumer = promote.consumer AND f.group_id = g
                ORDER BY f.commit_lsn, f.commit_idx LIMIT 1) first
         WHERE e.consumer = promote.consumer AND e.commit_lsn = first.commit_lsn
           AND e.commit_idx = first.commit_idx AND first.due_at IS NULL;
        RETURN;
    END IF;
    -- The rule of walbrook.is_head for all rows, because some message is of its whole table. In one pass: rows
    -- that were just copied have no statistics, and a plan that compares each with each takes minutes.
    UPDATE walbrook.events e SET due_at = clock_timestamp()
      FROM (
           SELECT f.commit_lsn, f.commit_idx, f.due_at, f.group_id, f.whole_table,
                  row_number() OVER (
                      PARTITION BY f.group_id ORDER BY f.commit_lsn, f.commit_idx) AS of_group,
                  row_number() OVER of_table AS of_table,
                  count(*) FILTER (WHERE f.whole_table) OVER (
                      of_table ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS barriers
             FROM walbrook.events f WHERE f.consumer = promote.consumer
           WINDOW of_table AS (
                  PARTITION BY f.table_schema, f.table_name ORDER BY f.commit_lsn, f.commit_idx)) w
     WHERE w.due_at IS NULL AND w.barriers = 0 AND (w.group_id IS NULL OR w.of_group = 1)
       AND (NOT w.whole_table OR w.of_table = 1)
       AND e.consumer = promote.consumer AND e.commit_lsn = w.commit_lsn
       AND e.commit_idx = w.commit_idx;
END
$$;

COMMENT ON FUNCTION walbrook.promote IS 'Let the first waiting message of each group be delivered; the service does it by itself.';

-- As before, and one that came late is said to be that.
CREATE OR REPLACE FUNCTION walbrook.bury(consumer integer, lsns pg_lsn[], idxs bigint[]) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    buried bigint;
BEGIN
    WITH dead AS (
        DELETE FROM walbrook.events e USING unnest(lsns, idxs) AS d (lsn, idx)
         WHERE e.consumer = bury.consumer AND e.commit_lsn = d.lsn AND e.commit_idx = d.idx
        RETURNING e.*),
    letters AS (
        INSERT INTO walbrook.dead_letters AS l
               (source, consumer, commit_lsn, commit_idx, commit_timestamp, table_schema,
                table_name, action, kind, error, event, deliveries)
        SELECT c.source, c.name, d.commit_lsn, d.commit_idx, d.commit_timestamp, d.table_schema,
               d.table_name, d.action, CASE d.error_kind WHEN 'late' THEN 'late' ELSE 'delivery' END,
               coalesce(d.error, 'it was given up'), row_to_json(d), d.deliveries
          FROM dead d JOIN walbrook.consumers c ON c.id = bury.consumer
            ON CONFLICT ON CONSTRAINT dead_letters_source_consumer_commit_lsn_commit_idx_key
            DO UPDATE SET error = excluded.error, event = excluded.event,
                          deliveries = l.deliveries + excluded.deliveries,
                          dead_at = clock_timestamp()
        RETURNING 1)
    SELECT count(*) INTO buried FROM letters;
    UPDATE walbrook.consumers c SET dead = c.dead + buried WHERE c.id = bury.consumer;
    RETURN buried;
END
$$;

COMMENT ON FUNCTION walbrook.bury IS 'Make dead letters of messages that wait in a consumer''s queue.';

-- The rule who must wait, of cdc/state/blocked_groups.py, for one row.
CREATE OR REPLACE FUNCTION walbrook.is_head(e walbrook.events) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN NOT EXISTS (
               SELECT FROM walbrook.events b
                WHERE b.consumer = e.consumer AND b.group_id = e.group_id
                  AND (b.commit_lsn, b.commit_idx) < (e.commit_lsn, e.commit_idx))
       AND NOT EXISTS (
               SELECT FROM walbrook.events b
                WHERE b.consumer = e.consumer AND b.whole_table
                  AND b.table_schema = e.table_schema AND b.table_name = e.table_name
                  AND (b.commit_lsn, b.commit_idx) < (e.commit_lsn, e.commit_idx))
       AND NOT (e.whole_table AND EXISTS (
               SELECT FROM walbrook.events b
                WHERE b.consumer = e.consumer
                  AND b.table_schema = e.table_schema AND b.table_name = e.table_name
                  AND (b.commit_lsn, b.commit_idx) < (e.commit_lsn, e.commit_idx)));
END
$$;

COMMENT ON FUNCTION walbrook.is_head IS 'Whether a message of a queue waits for no earlier one: of its group, or of its table where one of the two has its place there.';

-- As before, but for messages that are no changes of the source: they have numbers, which say nothing
-- of where in it they stand, and what they were made of may not come again.
CREATE OR REPLACE FUNCTION walbrook.cut_queue(c walbrook.consumers, target walbrook.place, for_good boolean)
RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    cut bigint;
BEGIN
    IF c.destination = 'pull' THEN
        RETURN walbrook.forget_records(c.id, target.lsn, target.idx, for_good);
    END IF;
    DELETE FROM walbrook.events e
     WHERE e.consumer = c.id AND (e.commit_lsn, e.commit_idx) >= (target.lsn, target.idx)
       AND (for_good OR e.action NOT IN ('window', 'watermark'));
    GET DIAGNOSTICS cut = ROW_COUNT;
    RETURN cut;
END
$$;
