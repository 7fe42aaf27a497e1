-- The order of event time: what operators push, and what is forgotten with a consumer.

-- Consumers in event-time order: how far each has released, of which source it has read how much, and
-- the watermarks of its tables. Times are whole microseconds since 1970, as exact as the source's own.
CREATE OR REPLACE FUNCTION walbrook.time_of(us bigint) RETURNS timestamptz
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT 'epoch'::timestamptz + us * interval '1 microsecond'
$$;

COMMENT ON FUNCTION walbrook.time_of IS 'Microseconds since 1970 as a time.';

CREATE OR REPLACE FUNCTION walbrook.drop_event_time() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM walbrook.event_time e
     WHERE e.consumer = OLD.name
       AND NOT EXISTS (SELECT FROM walbrook.consumers c WHERE c.name = OLD.name);
    RETURN NULL;
END
$$;

CREATE OR REPLACE TRIGGER drop_event_time AFTER DELETE ON walbrook.consumers
    FOR EACH ROW EXECUTE FUNCTION walbrook.drop_event_time();

CREATE OR REPLACE FUNCTION walbrook.finish_source(consumer text, source text, finished boolean DEFAULT true)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
    PERFORM walbrook.note_act('finish_source', jsonb_build_object(
        'source', finish_source.source, 'consumer', finish_source.consumer,
        'finished', finish_source.finished));
END
$$;

COMMENT ON FUNCTION walbrook.finish_source IS 'Say that a database of a consumer in event-time order has ended: what it sent is released without waiting for more of it. With finished => false it counts again.';

CREATE OR REPLACE FUNCTION walbrook.check_event_time(named text) RETURNS walbrook.event_time
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

CREATE OR REPLACE FUNCTION walbrook.advance_watermark(consumer text, to_time timestamptz, source text DEFAULT NULL)
RETURNS timestamptz
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
    PERFORM walbrook.note_act('advance_watermark', jsonb_build_object(
        'source', one, 'consumer', named, 'to_time', to_time));
    RETURN walbrook.time_of(us);
END
$$;

COMMENT ON FUNCTION walbrook.advance_watermark IS 'Say that nothing at or below a time is waited for any more: the watermark of a consumer in event-time order is at least that, or, with a source, the watermarks of that database''s tables are. It never goes back. Returns what it is at least from now on.';

CREATE OR REPLACE FUNCTION walbrook.set_partition_idle(consumer text, partition text, idle boolean DEFAULT true)
RETURNS walbrook.consumer_state
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
    RETURN walbrook.acted(c.id, 'set_partition_idle', 0, jsonb_build_object(
        'partition', partition, 'idle', coalesce(set_partition_idle.idle, true)));
END
$$;

COMMENT ON FUNCTION walbrook.set_partition_idle IS 'Mark a table of a consumer in event-time order as idle: it holds the watermark back no more, whatever comes of it, until it is marked active (idle => false). Then it counts from its last event on.';

-- All that comes again is not late, so what was pushed before does not hold any more.
CREATE OR REPLACE FUNCTION walbrook.forget_pushed() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE walbrook.event_time e SET pushed_to = NULL
     WHERE e.consumer = NEW.name AND e.pushed_to IS NOT NULL;
    UPDATE walbrook.event_sources s SET pushed_to = NULL FROM walbrook.consumers c
     WHERE c.id = s.consumer AND c.name = NEW.name AND s.pushed_to IS NOT NULL;
    RETURN NULL;
END
$$;

CREATE OR REPLACE TRIGGER forget_pushed AFTER UPDATE ON walbrook.consumers
    FOR EACH ROW WHEN (OLD.ledger IS DISTINCT FROM NEW.ledger)
    EXECUTE FUNCTION walbrook.forget_pushed();
