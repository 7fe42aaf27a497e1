-- Consumers in event-time order: how far each has released, of which source it has read how much, and
-- the watermarks of its tables. Times are whole microseconds since 1970, as exact as the source's own.

CREATE FUNCTION walbrook.time_of(us bigint) RETURNS timestamptz
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT 'epoch'::timestamptz + us * interval '1 microsecond'
$$;

COMMENT ON FUNCTION walbrook.time_of IS 'Microseconds since 1970 as a time.';

CREATE TABLE walbrook.event_time (
    consumer     text PRIMARY KEY,
    ordering     text NOT NULL DEFAULT 'event_time' CHECK (ordering IN ('event_time', 'processing_time')),
    base_lsn     pg_lsn NOT NULL,
    sequence     bigint NOT NULL DEFAULT 0,
    watermark    bigint,
    pushed_to    bigint,
    planned      boolean NOT NULL DEFAULT false,
    planned_from bigint,
    planned_to   bigint,
    order_mark   text NOT NULL DEFAULT '',
    sent_mark    text,
    moved_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (planned = (planned_to IS NOT NULL))
);

COMMENT ON TABLE walbrook.event_time IS 'Consumers in event-time order: one row each, whatever number of databases it reads.';
COMMENT ON COLUMN walbrook.event_time.base_lsn IS 'With sequence: what its next message is numbered; above every cursor that it ever had as a consumer in commit order.';
COMMENT ON COLUMN walbrook.event_time.sequence IS 'How many messages it has released.';
COMMENT ON COLUMN walbrook.event_time.watermark IS 'Microseconds since 1970: everything at or below it was released. Null before the first.';
COMMENT ON COLUMN walbrook.event_time.ordering IS 'As the sink''s configuration says: by the time in its rows, or by the time of their arrival.';
COMMENT ON COLUMN walbrook.event_time.pushed_to IS 'Microseconds since 1970: the watermark is at least that (walbrook.advance_watermark). Null if nobody said so since it began.';
COMMENT ON COLUMN walbrook.event_time.planned IS 'Whether a release is under way: from planned_from, exclusive, to planned_to. After a crash it is made again, the same to the last message.';
COMMENT ON COLUMN walbrook.event_time.order_mark IS 'Stands for what its configuration says of event times. With another one the same changes have other times, so it begins anew at its cursors.';
COMMENT ON COLUMN walbrook.event_time.sent_mark IS 'Stands for what the messages on their way are made of; null if none are. If that has changed after a crash, numbers begin that no destination has seen.';

CREATE TABLE walbrook.event_sources (
    consumer    integer PRIMARY KEY REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    ledger      uuid NOT NULL,
    cursor_lsn  pg_lsn NOT NULL,
    cursor_idx  bigint NOT NULL,
    read_lsn    pg_lsn NOT NULL,
    read_idx    bigint NOT NULL,
    settled_to  bigint,
    planned_lsn pg_lsn,
    planned_idx bigint,
    finished_at timestamptz,
    pushed_to   bigint,
    arrived     jsonb NOT NULL DEFAULT '[]'
);

COMMENT ON TABLE walbrook.event_sources IS 'How far such a consumer has read each of its databases. From its cursor up to there, what is due at or below settled_to was delivered; the rest is in its buffer.';
COMMENT ON COLUMN walbrook.event_sources.ledger IS 'walbrook.consumers.ledger when it was written: another one says that the cursor was moved back, and that all from there on comes again.';
COMMENT ON COLUMN walbrook.event_sources.cursor_lsn IS 'With cursor_idx: where its cursor was when it was written. Above it, it was moved forward.';
COMMENT ON COLUMN walbrook.event_sources.planned_lsn IS 'With planned_idx: how far the release under way has read.';
COMMENT ON COLUMN walbrook.event_sources.finished_at IS 'Since when this database is said to have ended (walbrook.finish_source): nobody waits for its time.';

COMMENT ON COLUMN walbrook.event_sources.pushed_to IS 'The same as walbrook.event_time.pushed_to for the tables of this database.';
COMMENT ON COLUMN walbrook.event_sources.arrived IS 'In processing-time order: from which cursor on (LSN as a number, index) changes have arrived at which time at the earliest, where their commits alone do not say so.';

CREATE TABLE walbrook.event_partitions (
    consumer   integer NOT NULL REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    table_name text NOT NULL,
    last_event bigint,
    seen_to    bigint,
    watermark  bigint,
    idle_since timestamptz,
    buffered   bigint NOT NULL DEFAULT 0,
    late       bigint NOT NULL DEFAULT 0,
    marked_idle boolean NOT NULL DEFAULT false,
    marked_at timestamptz,
    shown_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, table_name)
);

COMMENT ON TABLE walbrook.event_partitions IS 'The partitions of such a consumer: its tables in each of its databases.';
COMMENT ON COLUMN walbrook.event_partitions.last_event IS 'The largest event time of what was read when it was last settled.';
COMMENT ON COLUMN walbrook.event_partitions.seen_to IS 'The largest event time seen when it was last shown.';
COMMENT ON COLUMN walbrook.event_partitions.marked_idle IS 'Whether an operator has marked it idle (walbrook.set_partition_idle).';
COMMENT ON COLUMN walbrook.event_partitions.marked_at IS 'When an operator last marked it, idle or active.';

CREATE VIEW walbrook.watermarks AS
SELECT c.name AS consumer, c.source, p.table_name AS "table", walbrook.time_of(p.watermark) AS watermark,
       walbrook.time_of(greatest(p.seen_to, p.last_event)) AS last_event,
       CASE WHEN p.marked_idle THEN least(p.idle_since, p.marked_at) ELSE p.idle_since END AS idle_since,
       p.marked_idle, p.buffered, p.late AS late_count, walbrook.time_of(e.watermark) AS released_to,
       walbrook.time_of(greatest(e.pushed_to, s.pushed_to)) AS pushed_to, p.shown_at
  FROM walbrook.event_partitions p
  JOIN walbrook.consumers c ON c.id = p.consumer
  LEFT JOIN walbrook.event_sources s ON s.consumer = c.id
  LEFT JOIN walbrook.event_time e ON e.consumer = c.name
 WHERE c.active;

COMMENT ON VIEW walbrook.watermarks IS 'Consumers in event-time order, table by table: its watermark, since when it is idle, how many of its changes wait in the buffer and how many came late. released_to is the consumer''s own watermark, pushed_to what an operator pushed it or its database to. Written once a second.';

CREATE FUNCTION walbrook.drop_event_time() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM walbrook.event_time e
     WHERE e.consumer = OLD.name
       AND NOT EXISTS (SELECT FROM walbrook.consumers c WHERE c.name = OLD.name);
    RETURN NULL;
END
$$;

CREATE TRIGGER drop_event_time AFTER DELETE ON walbrook.consumers
    FOR EACH ROW EXECUTE FUNCTION walbrook.drop_event_time();

CREATE FUNCTION walbrook.finish_source(consumer text, source text, finished boolean DEFAULT true)
RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE walbrook.event_sources e
       SET finished_at = CASE WHEN finish_source.finished THEN coalesce(e.finished_at, clock_timestamp()) END
      FROM walbrook.consumers c
     WHERE c.id = e.consumer AND c.name = finish_source.consumer AND c.source = finish_source.source
       AND c.active;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no consumer % in event-time order that reads %', consumer, source
            USING ERRCODE = 'WB001', HINT = 'walbrook.watermarks shows which there are';
    END IF;
    PERFORM walbrook.announce(source, consumer, 'finish_source');
END
$$;

COMMENT ON FUNCTION walbrook.finish_source IS 'Say that a database of a consumer in event-time order has ended: what it sent is released without waiting for more of it. With finished => false it counts again.';

CREATE FUNCTION walbrook.check_event_time(named text) RETURNS walbrook.event_time
LANGUAGE plpgsql AS $$
DECLARE
    e walbrook.event_time;
BEGIN
    SELECT k.* INTO e FROM walbrook.event_time k
     WHERE k.consumer = named AND EXISTS (SELECT FROM walbrook.consumers c
                                           WHERE c.name = named AND c.active);
    IF e.ordering = 'event_time' THEN
        RETURN e;
    END IF;
    IF e.consumer IS NULL THEN
        PERFORM FROM walbrook.consumers c WHERE c.name = named AND c.active;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'there is no consumer %', coalesce(named, 'without a name')
                USING ERRCODE = 'WB001',
                      HINT = 'walbrook.watermarks shows which are in event-time order';
        END IF;
    END IF;
    RAISE EXCEPTION 'consumer % is not in event-time order', named
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = CASE WHEN e.consumer IS NULL
                  THEN 'it has no watermark: that takes ordering: event_time, and a start of the service'
                  ELSE 'it has ordering: processing_time, and its watermark follows the clock' END;
END
$$;

COMMENT ON FUNCTION walbrook.check_event_time IS 'The row of a consumer in event-time order; an error for every other one.';

CREATE FUNCTION walbrook.advance_watermark(consumer text, to_time timestamptz, source text DEFAULT NULL)
RETURNS timestamptz
LANGUAGE plpgsql AS $$
DECLARE
    of_one boolean := consumer LIKE '%/%' AND NOT EXISTS (SELECT FROM walbrook.event_time k
                                                           WHERE k.consumer = advance_watermark.consumer);
    named text := CASE WHEN of_one THEN regexp_replace(consumer, '^[^/]*/', '') ELSE consumer END;
    e walbrook.event_time := walbrook.check_event_time(named);
    one text := coalesce(advance_watermark.source,
                         CASE WHEN of_one THEN split_part(advance_watermark.consumer, '/', 1) END);
    us bigint;
BEGIN
    IF to_time IS NULL OR NOT isfinite(to_time)
       OR to_time NOT BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 23:59:59.999999+00' THEN
        RAISE EXCEPTION 'a watermark cannot be advanced to %', coalesce(to_time::text, 'null')
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'give a time of the years 1 to 9999';
    END IF;
    us := extract(epoch FROM date_trunc('minute', to_time))::bigint * 1000000
          + extract(microseconds FROM to_time)::bigint;
    IF one IS NULL THEN
        UPDATE walbrook.event_time k SET pushed_to = greatest(k.pushed_to, us)
         WHERE k.consumer = named RETURNING greatest(k.watermark, k.pushed_to) INTO us;
    ELSE
        UPDATE walbrook.event_sources s SET pushed_to = greatest(s.pushed_to, us)
          FROM walbrook.consumers c
         WHERE c.id = s.consumer AND c.name = named AND c.source = one AND c.active
        RETURNING s.pushed_to INTO us;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'consumer % reads no database %', named, one
                USING ERRCODE = 'WB001', HINT = 'walbrook.watermarks shows which it reads';
        END IF;
    END IF;
    PERFORM walbrook.announce(c.source, c.name, 'advance_watermark')
       FROM walbrook.consumers c WHERE c.name = named AND c.active;
    RETURN walbrook.time_of(us);
END
$$;

COMMENT ON FUNCTION walbrook.advance_watermark IS 'Say that nothing at or below a time is waited for any more: the watermark of a consumer in event-time order is at least that, or, with a source, the watermarks of that database''s tables are. It never goes back. Returns what it is at least from now on.';

CREATE FUNCTION walbrook.set_partition_idle(consumer text, partition text, idle boolean DEFAULT true)
RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(set_partition_idle.consumer);
    e walbrook.event_time := walbrook.check_event_time(c.name);
    others text;
BEGIN
    UPDATE walbrook.event_partitions p
       SET marked_idle = coalesce(set_partition_idle.idle, true), marked_at = clock_timestamp()
     WHERE p.consumer = c.id AND p.table_name = partition;
    IF NOT FOUND THEN
        SELECT string_agg(few.table_name, ', ' ORDER BY few.table_name) INTO others
          FROM (SELECT p.table_name FROM walbrook.event_partitions p
                 WHERE p.consumer = c.id ORDER BY 1 LIMIT 20) few;
        RAISE EXCEPTION 'consumer % has no partition %', c.name, coalesce(partition, 'without a name')
            USING ERRCODE = 'no_data_found',
                  HINT = 'a partition is a table, as schema.table; there are: '
                         || coalesce(others, 'none yet, until the service has read its tables');
    END IF;
    RETURN walbrook.acted(c.id, 'set_partition_idle', 0);
END
$$;

COMMENT ON FUNCTION walbrook.set_partition_idle IS 'Mark a table of a consumer in event-time order as idle: it holds the watermark back no more, whatever comes of it, until it is marked active (idle => false). Then it counts from its last event on.';

-- All that comes again is not late, so what was pushed before does not hold any more.
CREATE FUNCTION walbrook.forget_pushed() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE walbrook.event_time e SET pushed_to = NULL
     WHERE e.consumer = NEW.name AND e.pushed_to IS NOT NULL;
    UPDATE walbrook.event_sources s SET pushed_to = NULL FROM walbrook.consumers c
     WHERE c.id = s.consumer AND c.name = NEW.name AND s.pushed_to IS NOT NULL;
    RETURN NULL;
END
$$;

CREATE TRIGGER forget_pushed AFTER UPDATE ON walbrook.consumers
    FOR EACH ROW WHEN (OLD.ledger IS DISTINCT FROM NEW.ledger)
    EXECUTE FUNCTION walbrook.forget_pushed();

ALTER TABLE walbrook.dead_letters DROP CONSTRAINT dead_letters_kind_check;
ALTER TABLE walbrook.dead_letters
    ADD CONSTRAINT dead_letters_kind_check
    CHECK (kind IN ('decode', 'expression', 'delivery', 'event_time', 'late'));

COMMENT ON COLUMN walbrook.dead_letters.kind IS 'At which step it failed; decode: it could not be read; expression: the consumer''s filter, transform or routing failed on it; delivery: whatever delivered it broke; event_time: its event time could not be read; late: it came after its time, and the consumer''s late_policy is dead_letter.';

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
        PERFORM FROM walbrook.stored s WHERE s.consumer = c.id FOR UPDATE;
        PERFORM FROM walbrook.pulls p WHERE p.consumer = c.id FOR UPDATE;
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

CREATE FUNCTION walbrook.called(source text, consumer text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN EXISTS (SELECT FROM walbrook.consumers k
                              WHERE k.name = called.consumer AND k.source <> called.source AND k.active)
                THEN called.source || '/' ELSE '' END || called.consumer
$$;

COMMENT ON FUNCTION walbrook.called IS 'What an operator calls a consumer: its name, or database/consumer if several databases have one.';

CREATE FUNCTION walbrook.is_numbered(c walbrook.consumers) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM walbrook.event_sources e WHERE e.consumer = c.id)
$$;

COMMENT ON FUNCTION walbrook.is_numbered IS 'Whether its messages have numbers in place of cursors, as in event-time order: then what comes again has a number that its destination has not seen.';

-- As before, and one whose messages are numbered gets everything again, whatever its destination is,
-- from its cursor on at the latest.
CREATE OR REPLACE FUNCTION walbrook.rewind(
    consumer text,
    to_cursor text DEFAULT NULL,
    to_time timestamptz DEFAULT NULL,
    to_earliest boolean DEFAULT false
) RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(rewind.consumer);
    stands text := c.cursor_lsn || ':' || c.cursor_idx;
    earliest walbrook.place;
    log_end walbrook.place := walbrook.end_for(c);
    target walbrook.place;
    cut bigint;
BEGIN
    IF num_nonnulls(to_cursor, to_time, nullif(to_earliest, false)) <> 1 THEN
        RAISE EXCEPTION 'it is not clear where % is to go', c.name
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'give one of to_cursor, to_time and to_earliest => true';
    END IF;
    SELECT coalesce(s.earliest_lsn, s.restart_lsn), coalesce(s.earliest_idx, s.restart_idx)
      INTO earliest FROM walbrook.sources s WHERE s.name = c.source;
    target := CASE WHEN to_cursor IS NOT NULL THEN walbrook.parse_cursor(to_cursor)
                   WHEN to_time IS NOT NULL
                   THEN greatest(walbrook.place_at(c.source, to_time), earliest)
                   ELSE earliest END;
    IF target < earliest THEN
        RAISE EXCEPTION 'the change log of % no longer has %:%: it begins at %:%', c.source,
                        target.lsn, target.idx, earliest.lsn, earliest.idx
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'to begin with the first change that it has, say to_earliest => true';
    END IF;
    IF target > log_end THEN
        RAISE EXCEPTION '%:% is beyond the end of the change log of %, which is %:%', target.lsn,
                        target.idx, c.source, log_end.lsn, log_end.idx
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'walbrook.cursors shows where everyone stands';
    END IF;
    -- Behind its cursor some was delivered and some is held back: all of it comes again.
    IF walbrook.is_numbered(c) THEN
        target := least(target, ROW(c.cursor_lsn, c.cursor_idx)::walbrook.place);
    END IF;
    IF target > ROW(c.cursor_lsn, c.cursor_idx)::walbrook.place THEN
        RAISE EXCEPTION '% stands at %, which is before %:%', c.name, stands, target.lsn, target.idx
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'nothing is passed over by a rewind; to give up all that it has not had, '
                         'walbrook.discard_all';
    END IF;
    IF walbrook.keeps_position(c.destination) AND NOT walbrook.follows_rewinds(c.destination)
       AND NOT walbrook.is_numbered(c) THEN
        RAISE EXCEPTION '% would get nothing again: its destination (%) keeps a position of its '
                        'own and takes what is below it for repeats', c.name, c.destination
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('give it an empty destination (another %s), start the service, and '
                                'then: UPDATE walbrook.consumers SET cursor_lsn = %L, '
                                'cursor_idx = %s WHERE source = %L AND name = %L',
                                CASE c.destination WHEN 'redis_stream' THEN 'stream_key'
                                                   ELSE 'path' END,
                                target.lsn, target.idx, c.source, c.name);
    END IF;
    -- What a pull consumer has stored above where it stands is about to be settled: if it were taken
    -- out while the cursor stays, that would go past it.
    IF c.destination = 'pull' AND target = ROW(c.cursor_lsn, c.cursor_idx)::walbrook.place THEN
        RETURN walbrook.acted(c.id, 'rewind', 0);
    END IF;
    cut := walbrook.cut_queue(c, target, for_good => false);
    DELETE FROM walbrook.ledger l WHERE l.ledger = c.ledger AND walbrook.is_numbered(c);
    -- What was given up or dropped from there on comes after all.
    DELETE FROM walbrook.gaps g
     WHERE g.source = c.source AND g.consumer = c.name AND g.reason IN ('discarded', 'cap', 'ttl', 'backlog', 'skipped')
       AND (g.from_lsn, g.from_idx) >= (target.lsn, target.idx);
    UPDATE walbrook.gaps g SET to_lsn = target.lsn, to_idx = target.idx
     WHERE g.source = c.source AND g.consumer = c.name AND g.reason IN ('discarded', 'cap', 'ttl', 'backlog', 'skipped')
       AND (g.to_lsn, g.to_idx) > (target.lsn, target.idx);
    UPDATE walbrook.consumers k
       SET cursor_lsn = target.lsn, cursor_idx = target.idx, moved_at = clock_timestamp(),
           backlog_excused = true,
           -- By it one that stands where it is to begin anew sees that it is to.
           ledger = CASE WHEN walbrook.is_numbered(c) THEN gen_random_uuid() ELSE k.ledger END
     WHERE k.id = c.id;
    RETURN walbrook.acted(c.id, 'rewind', cut);
END
$$;

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

-- As before, and named either way.
CREATE OR REPLACE FUNCTION walbrook.find_dead_letter(number bigint, consumer text)
RETURNS walbrook.dead_letters
LANGUAGE plpgsql AS $$
DECLARE
    d walbrook.dead_letters;
BEGIN
    SELECT * INTO d FROM walbrook.dead_letters k WHERE k.id = number;
    IF d.id IS NULL
       OR find_dead_letter.consumer NOT IN (d.consumer, d.source || '/' || d.consumer) THEN
        RAISE EXCEPTION 'there is no dead letter %', number
                        || coalesce(' of ' || find_dead_letter.consumer, '')
            USING ERRCODE = 'no_data_found',
                  HINT = 'walbrook.dead_letters lists them by their id; one that was sent again or '
                         'discarded is there no more';
    END IF;
    RETURN d;
END
$$;

-- As before; it knows its database, so nothing is ambiguous.
CREATE OR REPLACE FUNCTION walbrook.redeliver(dead_letter bigint, consumer text DEFAULT NULL)
RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    d walbrook.dead_letters := walbrook.find_dead_letter(dead_letter, redeliver.consumer);
    c walbrook.consumers;
BEGIN
    IF NOT EXISTS (SELECT FROM walbrook.consumers k
                    WHERE k.source = d.source AND k.name = d.consumer AND k.active) THEN
        RAISE EXCEPTION 'dead letter % has nowhere to go: there is no consumer % any more', d.id,
                        d.consumer
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('add it to the configuration again and start the service, or '
                                'walbrook.discard(%s)', d.id);
    END IF;
    c := walbrook.find_consumer(d.source || '/' || d.consumer);
    PERFORM walbrook.check_redelivery(d, c);
    RETURN walbrook.acted(c.id, 'redeliver', walbrook.put_back(c, ARRAY[d.id]));
END
$$;

-- As before, and of an event time that could not be read it says what helps.
CREATE OR REPLACE FUNCTION walbrook.check_redelivery(d walbrook.dead_letters, c walbrook.consumers)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    again text := format('walbrook.rewind(%L, %L): everything from there on comes again',
                         walbrook.called(d.source, d.consumer), d.commit_lsn || ':' || d.commit_idx);
BEGIN
    IF d.event IS NULL THEN
        RAISE EXCEPTION 'dead letter % of % never was a message (%)', d.id, d.consumer, d.kind
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = CASE d.kind
                      WHEN 'decode' THEN 'correct the row in the source: the correction arrives as '
                                         'a change of its own'
                      WHEN 'event_time' THEN 'correct the row in the source, where the correction '
                                             'arrives as a change of its own; or correct event_time '
                                             'of the sink, start the service, and ' || again
                      WHEN 'expression' THEN 'correct the expression, start the service, and ' || again
                      ELSE again END
                      || format('; then walbrook.discard(%s)', d.id);
    END IF;
    IF NOT walbrook.is_of(d, c) THEN
        RAISE EXCEPTION 'dead letter % is of an earlier consumer % than there is now', d.id, c.name
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('take what you need of it from the column event, then '
                                'walbrook.discard(%s)', d.id);
    END IF;
    IF walbrook.keeps_position(c.destination) THEN
        RAISE EXCEPTION '% would not take dead letter % again: its destination (%) holds messages '
                        'in the order of their cursors and takes this one for a repeat',
                        d.consumer, d.id, c.destination
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('bring the destination up to date from the column event, then '
                                'walbrook.discard(%s)', d.id);
    END IF;
END
$$;
