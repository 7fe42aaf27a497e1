-- What the configuration no longer names: forgotten with all that is known of it.

CREATE OR REPLACE FUNCTION walbrook.forget(consumer text) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    gone walbrook.consumers;
    forgotten integer := 0;
BEGIN
    IF EXISTS (SELECT FROM walbrook.consumers k
                WHERE k.active AND (k.name = forget.consumer
                                    OR k.source || '/' || k.name = forget.consumer)) THEN
        RAISE EXCEPTION 'consumer % is active: the service serves it', forget.consumer
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'take it out of the configuration first, and apply that or start the service';
    END IF;
    FOR gone IN
        DELETE FROM walbrook.consumers k
         WHERE k.name = forget.consumer OR k.source || '/' || k.name = forget.consumer
        RETURNING k.*
    LOOP
        forgotten := forgotten + 1;
        DELETE FROM walbrook.dead_letters d WHERE d.source = gone.source AND d.consumer = gone.name;
        DELETE FROM walbrook.gaps g WHERE g.source = gone.source AND g.consumer = gone.name;
        DELETE FROM walbrook.health_events h WHERE h.source = gone.source AND h.consumer = gone.name;
    END LOOP;
    IF forgotten = 0 THEN
        RAISE EXCEPTION 'there is no consumer %', forget.consumer
            USING ERRCODE = 'WB001',
                  HINT = 'walbrook.consumers lists them; those with active = false can be forgotten';
    END IF;
    PERFORM walbrook.note_act('forget', jsonb_build_object('consumer', forget.consumer));
    RETURN forgotten;
END
$$;

COMMENT ON FUNCTION walbrook.forget IS 'Remove a consumer that the configuration no longer names, with its cursor, queue, dead letters, gaps and backfills. Returns of how many sources. What its destination holds stays.';

CREATE OR REPLACE FUNCTION walbrook.forget_source(source text) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s walbrook.sources;
    forgotten integer;
BEGIN
    SELECT * INTO s FROM walbrook.sources k WHERE k.name = forget_source.source FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no source %', forget_source.source
            USING ERRCODE = 'no_data_found', HINT = 'walbrook.sources lists them';
    END IF;
    -- The lock that a service holds for each of its sources.
    IF NOT pg_try_advisory_xact_lock(hashtextextended('walbrook.source.' || s.name, 0)) THEN
        RAISE EXCEPTION 'source % is served', s.name
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'take it out of the configuration first, and apply that or stop the service';
    END IF;
    SELECT count(*) INTO forgotten FROM walbrook.consumers k WHERE k.source = s.name;
    DELETE FROM walbrook.sources k WHERE k.name = s.name;
    PERFORM walbrook.note_act('forget_source', jsonb_build_object('source', s.name));
    RETURN forgotten;
END
$$;

COMMENT ON FUNCTION walbrook.forget_source IS 'Remove a source that is not served any more, with its consumers and all that is known of them. Returns how many consumers. Its slot stays: drop it, or it holds back WAL.';
