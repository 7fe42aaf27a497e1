-- What a push consumer could not deliver yet: a queue of its own for each, beside its cursor.

ALTER TABLE walbrook.consumers
    ADD COLUMN id          integer GENERATED ALWAYS AS IDENTITY UNIQUE,
    ADD COLUMN destination text NOT NULL DEFAULT '',
    ADD COLUMN priority    integer NOT NULL DEFAULT 5,
    ADD COLUMN paused_at   timestamptz,
    ADD COLUMN breaker     text NOT NULL DEFAULT 'closed'
                           CHECK (breaker IN ('closed', 'open', 'half_open'));

COMMENT ON COLUMN walbrook.consumers.id IS 'What its queue is known by: walbrook.events_<id>.';
COMMENT ON COLUMN walbrook.consumers.destination IS 'The type of its destination.';
COMMENT ON COLUMN walbrook.consumers.priority IS 'Its share of delivery when there is more to do than can be done; more is more.';
COMMENT ON COLUMN walbrook.consumers.breaker IS 'open: its destination failed as a whole and nothing is sent until retry_at; half_open: it is being tried; closed: all is well.';
COMMENT ON COLUMN walbrook.consumers.paused_at IS 'Since when an operator holds it back; null while it is served.';

CREATE TABLE walbrook.events (
    consumer         integer NOT NULL,
    commit_lsn       pg_lsn NOT NULL,
    commit_idx       bigint NOT NULL,
    group_id         bigint,
    whole_table      boolean NOT NULL DEFAULT false,
    due_at           timestamptz,
    deliveries       integer NOT NULL DEFAULT 0,
    abandoned        integer NOT NULL DEFAULT 0,
    error            text,
    error_kind       text,
    tried_at         timestamptz,
    queued_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_id         bigint,
    holder           text,
    lease_until      timestamptz,
    commit_timestamp timestamptz NOT NULL,
    xid              bigint NOT NULL,
    table_schema     text NOT NULL,
    table_name       text NOT NULL,
    action           text NOT NULL,
    record           text,
    changes          text,
    record_pks       text NOT NULL,
    old_record_pks   text,
    unchanged        text,
    annotations      text,
    "before"         text,
    message          text,
    route            text,
    PRIMARY KEY (consumer, commit_lsn, commit_idx)
) PARTITION BY LIST (consumer);

-- The claim: those that are due, then their groups in order.
CREATE INDEX events_due ON walbrook.events (consumer, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX events_group ON walbrook.events (consumer, group_id, commit_lsn, commit_idx);
CREATE INDEX events_held ON walbrook.events (consumer, holder) WHERE holder IS NOT NULL;
CREATE INDEX events_whole_table ON walbrook.events (consumer, table_schema, table_name)
    WHERE whole_table;

CREATE SEQUENCE walbrook.lease_ids;

COMMENT ON TABLE walbrook.events IS 'Messages of push consumers that wait: refused ones, and those of their groups that came later. One partition a consumer.';
COMMENT ON COLUMN walbrook.events.consumer IS 'walbrook.consumers.id.';
COMMENT ON COLUMN walbrook.events.commit_lsn IS 'With commit_idx: the cursor of the change.';
COMMENT ON COLUMN walbrook.events.group_id IS 'A number of its group: a message waits for every earlier one of its group. Null: it belongs to none.';
COMMENT ON COLUMN walbrook.events.whole_table IS 'It has its place among all messages of its table: a truncate, or a row whose key changed.';
COMMENT ON COLUMN walbrook.events.due_at IS 'When it is tried again; null while it waits for an earlier one.';
COMMENT ON COLUMN walbrook.events.deliveries IS 'How often its sink has refused it.';
COMMENT ON COLUMN walbrook.events.abandoned IS 'How often the process that was delivering it alone ended before it said what became of it.';
COMMENT ON COLUMN walbrook.events.error IS 'Why it was refused last, in full: it may quote the message, as the row does. Null if it has only waited.';
COMMENT ON COLUMN walbrook.events.error_kind IS 'poison: for its content; transient: for a reason that may pass.';
COMMENT ON COLUMN walbrook.events.lease_id IS 'With holder and lease_until: who is delivering it, and until when nobody else does.';
COMMENT ON COLUMN walbrook.events.message IS 'What the consumer''s transform made of it; null without one.';
COMMENT ON COLUMN walbrook.events.route IS 'Where the consumer''s routing sends it; null for the sink''s own place.';

CREATE FUNCTION walbrook.make_queue(consumer integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF to_regclass(format('walbrook.events_%s', make_queue.consumer)) IS NULL THEN
        EXECUTE format('CREATE TABLE walbrook.events_%s PARTITION OF walbrook.events FOR VALUES IN (%s)',
                       make_queue.consumer, make_queue.consumer);
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.make_queue IS 'Make the partitions of a consumer''s queue; done when it is first configured.';

-- With a consumer goes what waits for it.
CREATE FUNCTION walbrook.drop_queue() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('DROP TABLE IF EXISTS walbrook.events_%s', OLD.id);
    RETURN NULL;
END
$$;

CREATE TRIGGER drop_queue AFTER DELETE ON walbrook.consumers
    FOR EACH ROW EXECUTE FUNCTION walbrook.drop_queue();

SELECT walbrook.make_queue(id) FROM walbrook.consumers;

-- A dead letter that came through a queue is kept as the row it was there.
ALTER TABLE walbrook.dead_letters
    ALTER COLUMN payload DROP NOT NULL,
    ADD COLUMN event json,
    ADD COLUMN deliveries integer NOT NULL DEFAULT 0,
    ADD CONSTRAINT dead_letters_content_check CHECK (payload IS NOT NULL OR event IS NOT NULL);

COMMENT ON TABLE walbrook.dead_letters IS 'Changes that a consumer went on without; walbrook.redeliver sends one again if that can be, walbrook.discard acknowledges it.';
COMMENT ON COLUMN walbrook.dead_letters.payload IS 'The pgoutput message of the change as the source sent it; null for one that was refused by its sink.';
COMMENT ON COLUMN walbrook.dead_letters.event IS 'The row of walbrook.events or walbrook.records that it was; null for one that never was a message.';
COMMENT ON COLUMN walbrook.dead_letters.deliveries IS 'How often its delivery was tried.';

-- The first row of each group is due. Called with the consumer's row in walbrook.consumers locked, by
-- whoever added or took rows of these groups; without groups, for all of them.
CREATE FUNCTION walbrook.promote(consumer integer, groups bigint[] DEFAULT NULL) RETURNS void
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
    -- Some message has its place among all of its table: look at every one that waits. In one pass: rows
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

-- Rows of a consumer's queue become dead letters; what waited for them goes on.
CREATE FUNCTION walbrook.bury(consumer integer, lsns pg_lsn[], idxs bigint[]) RETURNS bigint
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
               d.table_name, d.action, 'delivery', coalesce(d.error, 'it was given up'),
               row_to_json(d), d.deliveries
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

CREATE VIEW walbrook.queues AS
SELECT c.source, c.name AS consumer, q.waiting, q.refused, q.oldest, q.next_due, f.first_refused
  FROM walbrook.consumers c
 CROSS JOIN LATERAL (
       SELECT count(*) AS waiting, count(e.error) AS refused, min(e.queued_at) AS oldest,
              min(e.due_at) AS next_due
         FROM walbrook.events e WHERE e.consumer = c.id) q
  LEFT JOIN LATERAL (
       -- Not its error, which may quote the row.
       SELECT format('%s, %s%s', e.error_kind, e.commit_lsn || ':' || e.commit_idx,
                     ' of table ' || nullif(e.table_schema || '.' || e.table_name, '.'))
              AS first_refused
         FROM walbrook.events e WHERE e.consumer = c.id AND e.error IS NOT NULL
        ORDER BY e.commit_lsn, e.commit_idx LIMIT 1) f ON true
 WHERE q.waiting > 0;

COMMENT ON VIEW walbrook.queues IS 'Push consumers for which messages wait: how many, how many of them were refused, since when, when the next is tried, and kind, cursor and table of the first that was refused.';
