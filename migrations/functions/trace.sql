-- What became of one change, as far as SQL knows; and live traces of a consumer.

-- The rows of walbrook.trace about consumers: where each stands, and what it has of this change.
CREATE OR REPLACE FUNCTION walbrook.trace(source text, at_cursor text)
RETURNS TABLE (consumer text, step text, at timestamptz, what text, detail jsonb)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    place walbrook.place := walbrook.parse_cursor(trace.at_cursor);
BEGIN
    IF NOT EXISTS (SELECT FROM walbrook.sources s WHERE s.name = trace.source) THEN
        RAISE EXCEPTION 'there is no source %', trace.source
            USING ERRCODE = 'no_data_found', HINT = 'walbrook.sources lists them';
    END IF;
    RETURN QUERY
    SELECT found.* FROM (
        SELECT NULL::text AS consumer, 'log' AS step, g.sealed_at AS at,
               CASE g.tier WHEN 'active' THEN 'in the log''s active segment'
                           WHEN 'hot' THEN 'in a sealed segment of the log'
                           ELSE 'in a segment of the second tier' END AS what,
               jsonb_build_object('first_batch', g.first_batch, 'tier', g.tier) AS detail
          FROM walbrook.log_segments g
         WHERE g.source = trace.source AND (g.first_lsn, g.first_idx) <= (place.lsn, place.idx)
           AND (place.lsn, place.idx) < (g.high_lsn, g.high_idx)
         UNION ALL
        SELECT c.name, 'cursor', CASE WHEN s.settled THEN NULL ELSE c.moved_at END,
               CASE WHEN s.settled THEN 'settled: its cursor is beyond it'
                    ELSE 'not settled: its cursor is not beyond it' END,
               jsonb_strip_nulls(jsonb_build_object(
                   'settled', s.settled, 'cursor', c.cursor_lsn || ':' || c.cursor_idx,
                   'active', c.active, 'state', c.state, 'state_reason', c.state_reason,
                   'paused_at', c.paused_at, 'last_error', c.last_error,
                   'destination', c.destination, 'generation', c.generation,
                   'read', CASE WHEN r.consumer IS NOT NULL THEN
                           (place.lsn, place.idx) < (r.read_lsn, r.read_idx) END))
          FROM walbrook.consumers c
          LEFT JOIN walbrook.event_sources r ON r.consumer = c.id
         CROSS JOIN LATERAL (SELECT (place.lsn, place.idx) < (c.cursor_lsn, c.cursor_idx) AS settled) s
         WHERE c.source = trace.source
         UNION ALL
        SELECT c.name, 'begun', c.created_at, 'it began behind this change, at '
               || c.begun_lsn || ':' || c.begun_idx,
               jsonb_build_object('cursor', c.begun_lsn || ':' || c.begun_idx)
          FROM walbrook.consumers c
         WHERE c.source = trace.source AND (place.lsn, place.idx) < (c.begun_lsn, c.begun_idx)
         UNION ALL
        SELECT g.consumer, 'gap', g.noted_at, 'given up: ' || g.reason,
               jsonb_strip_nulls(jsonb_build_object(
                   'reason', g.reason, 'from', g.from_lsn || ':' || g.from_idx,
                   'to', g.to_lsn || ':' || g.to_idx, 'reported_at', g.reported_at, 'repair', g.repair))
          FROM walbrook.gaps g
         WHERE g.source = trace.source AND (g.from_lsn, g.from_idx) <= (place.lsn, place.idx)
           AND (place.lsn, place.idx) < (g.to_lsn, g.to_idx)
         UNION ALL
        SELECT c.name, 'waits', e.queued_at,
               CASE WHEN e.due_at IS NULL THEN 'it waits behind an earlier message of its group'
                    WHEN e.deliveries = 0 THEN 'it waits, due now or soon'
                    ELSE format('it waits to be tried again; refusals: %s', e.deliveries) END,
               jsonb_strip_nulls(jsonb_build_object(
                   'due_at', e.due_at, 'deliveries', e.deliveries, 'tried_at', e.tried_at,
                   'error_kind', e.error_kind, 'attempts', e.attempts,
                   'leased_until', e.lease_until))
          FROM walbrook.consumers c JOIN walbrook.events e ON e.consumer = c.id
         WHERE c.source = trace.source AND e.commit_lsn = place.lsn AND e.commit_idx = place.idx
         UNION ALL
        SELECT d.consumer, 'dead', d.dead_at, 'a dead letter: ' || d.kind,
               jsonb_strip_nulls(jsonb_build_object(
                   'id', d.id, 'kind', d.kind, 'deliveries', d.deliveries,
                   'attempts', d.event -> 'attempts'))
          FROM walbrook.dead_letters d
         WHERE d.source = trace.source AND d.commit_lsn = place.lsn AND d.commit_idx = place.idx
         UNION ALL
        SELECT c.name, 'stored', r.stored_at,
               CASE WHEN f.lease_until IS NOT NULL THEN 'handed out to a worker'
                    WHEN f.consumer IS NOT NULL THEN 'it waits to be handed out again'
                    ELSE 'it waits to be fetched' END,
               jsonb_strip_nulls(jsonb_build_object(
                   'deliveries', coalesce(f.deliveries, 0), 'leased_until', f.lease_until,
                   'due_at', f.due_at, 'holder', f.holder))
          FROM walbrook.consumers c JOIN walbrook.pull_messages r ON r.consumer = c.id
          LEFT JOIN walbrook.pull_in_flight f ON f.consumer = r.consumer
               AND f.commit_lsn = r.commit_lsn AND f.commit_idx = r.commit_idx
         WHERE c.source = trace.source AND r.commit_lsn = place.lsn AND r.commit_idx = place.idx
           AND r.action <> 'gap'
    ) found ORDER BY found.consumer NULLS FIRST, found.at NULLS LAST, found.step;
END
$$;

COMMENT ON FUNCTION walbrook.trace IS 'What SQL knows of the change at a cursor, per consumer and without row values; the command walbrook trace adds what the log and the records of delivery know.';

-- Watch a consumer: its worker samples what its expressions see and make of it. Returns the id by which
-- the samples are fetched.
CREATE OR REPLACE FUNCTION walbrook.start_live_trace(
    consumer text, seconds integer DEFAULT 30, per_second integer DEFAULT 10
) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(start_live_trace.consumer);
    started uuid;
BEGIN
    IF (seconds BETWEEN 1 AND 600 AND per_second BETWEEN 1 AND 100) IS NOT TRUE THEN
        RAISE EXCEPTION 'a live trace lasts 1 to 600 seconds and takes 1 to 100 samples per second'
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = format('walbrook.start_live_trace(%L, 30, 10)', start_live_trace.consumer);
    END IF;
    IF walbrook.is_numbered(c) THEN
        RAISE EXCEPTION '% is not in commit order, and cannot be watched live', c.name
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'walbrook trace shows what became of one change';
    END IF;
    DELETE FROM walbrook.live_traces t WHERE t.ends_at < clock_timestamp() - interval '10 seconds';
    IF (SELECT count(*) FROM walbrook.live_traces t WHERE t.consumer = c.id) >= 4 THEN
        RAISE EXCEPTION '% is watched by four live traces already', c.name
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'wait until one of them has ended';
    END IF;
    INSERT INTO walbrook.live_traces AS t (consumer, per_second, ends_at)
    VALUES (c.id, start_live_trace.per_second,
            clock_timestamp() + make_interval(secs => start_live_trace.seconds))
    RETURNING t.id INTO started;
    PERFORM pg_notify('walbrook', json_build_object(
        'source', c.source, 'consumer', c.name, 'action', 'live_trace')::text);
    RETURN started;
END
$$;

COMMENT ON FUNCTION walbrook.start_live_trace IS 'Watch a consumer for some seconds; walbrook.live_samples gives what was sampled since the last call.';

CREATE OR REPLACE FUNCTION walbrook.live_samples(trace uuid) RETURNS SETOF json
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH fetched AS (
        DELETE FROM walbrook.live_samples s WHERE s.trace = live_samples.trace
        RETURNING s.number, s.sample)
    SELECT f.sample::json FROM fetched f ORDER BY f.number
$$;

COMMENT ON FUNCTION walbrook.live_samples IS 'The samples of a live trace that were not fetched yet; they are removed.';

CREATE OR REPLACE FUNCTION walbrook.end_live_trace(trace uuid) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DELETE FROM walbrook.live_traces t WHERE t.id = end_live_trace.trace
$$;

COMMENT ON FUNCTION walbrook.end_live_trace IS 'End a live trace before its time; samples that were not fetched go with it.';
