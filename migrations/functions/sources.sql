-- What a source is behind, what its log holds, and how an operator accepts a gap.

-- How many seconds a reader is behind the clock. Its row is written about every ten seconds, so a
-- younger one means that it reads.
CREATE OR REPLACE FUNCTION walbrook.reader_lag(current_at timestamptz) RETURNS numeric
LANGUAGE sql VOLATILE AS $$
    SELECT CASE WHEN current_at < clock_timestamp() - interval '30 seconds'
                THEN extract(epoch FROM clock_timestamp() - current_at) ELSE 0 END
$$;

-- The end of a source's WAL: as its reader last saw it, or as it is now where this is its server.
CREATE OR REPLACE FUNCTION walbrook.wal_end(s walbrook.sources) RETURNS pg_lsn
LANGUAGE sql AS $$
    SELECT greatest(s.head_lsn, CASE WHEN c.system_identifier::text = s.system_identifier
                                     THEN pg_current_wal_flush_lsn() END)
      FROM pg_control_system() c
$$;

-- For an operator who has read why the source stopped and lets the changes go that the slot lost.
-- Invariant: nothing moves unless the reader found that changes are lost, does not read, and has seen
-- WAL up to the place to move to.
CREATE OR REPLACE FUNCTION walbrook.accept_gap(source text, lsn pg_lsn) RETURNS SETOF walbrook.gaps
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    -- The kinds of health events whose fix is to accept a gap.
    lost CONSTANT text[] := ARRAY['slot_missing', 'slot_lost', 'slot_ahead', 'publication_replaced',
                                  'prepared_missing', 'untranslatable_text', 'log_ends_early',
                                  'spill_damaged'];
    s walbrook.sources;
BEGIN
    SELECT * INTO s FROM walbrook.sources k WHERE k.name = accept_gap.source FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no source %', accept_gap.source
            USING HINT = 'walbrook.sources lists them';
    END IF;
    IF s.state IN ('streaming', 'paused') THEN
        RAISE EXCEPTION 'source % is being read: it has no gap to accept', s.name
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'a reader that misses changes stops, and walbrook.health says what to call; '
                         'to pass over changes of one consumer, walbrook.discard_all';
    END IF;
    IF NOT EXISTS (SELECT FROM walbrook.health h
                    WHERE h.source = s.name AND h.consumer IS NULL AND h.kind = ANY (lost)) THEN
        RAISE EXCEPTION 'nothing says that source % has lost changes', s.name
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'start the service: if changes are lost, the reader stops, and walbrook.health '
                         'says what to call';
    END IF;
    IF accept_gap.lsn <= s.restart_lsn THEN
        RAISE EXCEPTION 'source % already stands at %, not before %', s.name, s.restart_lsn,
                        accept_gap.lsn
            USING HINT = 'there is no gap to accept; the source''s last_error says where it stands';
    END IF;
    IF (accept_gap.lsn <= walbrook.wal_end(s)) IS NOT TRUE THEN
        RAISE EXCEPTION '% is beyond the end of the WAL of source %, which was last seen at %',
                        accept_gap.lsn, s.name, coalesce(walbrook.wal_end(s)::text, 'no place yet')
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'if the slot is there now, start the service: the reader sees how far the WAL '
                         'goes, and walbrook.health says what to call';
    END IF;
    RETURN QUERY
        INSERT INTO walbrook.gaps AS g
               (source, consumer, from_lsn, from_idx, to_lsn, to_idx, reason)
        SELECT c.source, c.name, c.cursor_lsn, c.cursor_idx, accept_gap.lsn, 0, 'accepted'
          FROM walbrook.consumers c
         WHERE c.source = accept_gap.source AND c.active AND c.cursor_lsn < accept_gap.lsn
            ON CONFLICT ON CONSTRAINT gaps_source_consumer_from_lsn_from_idx_key
            DO UPDATE SET to_lsn = excluded.to_lsn, to_idx = excluded.to_idx,
                          reason = excluded.reason, noted_at = excluded.noted_at, reported_at = NULL
        RETURNING g.*;
    UPDATE walbrook.consumers c
       SET cursor_lsn = accept_gap.lsn, cursor_idx = 0, moved_at = clock_timestamp()
     WHERE c.source = accept_gap.source AND c.active AND c.cursor_lsn < accept_gap.lsn;
    UPDATE walbrook.sources k
       SET restart_lsn = accept_gap.lsn, restart_idx = 0, restart_at = clock_timestamp(),
           publication_oid = NULL, last_error = 'the gap is accepted; start the service'
     WHERE k.name = accept_gap.source;
    PERFORM walbrook.note_act('accept_gap', jsonb_build_object(
        'source', accept_gap.source, 'lsn', accept_gap.lsn));
END
$$;

COMMENT ON FUNCTION walbrook.accept_gap IS 'Move a source that has lost changes, and its consumers, to lsn, recording what they will never get; once its reader has stopped.';

CREATE OR REPLACE FUNCTION walbrook.backlog(source text, lsn pg_lsn, idx bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum(g.bytes), 0)::bigint FROM walbrook.log_segments g
     WHERE g.source = backlog.source AND (g.first_lsn, g.first_idx) >= (backlog.lsn, backlog.idx)
$$;

COMMENT ON FUNCTION walbrook.backlog IS 'Bytes of the log segments that begin at or behind a cursor; the segment that holds the cursor is left out.';

CREATE OR REPLACE FUNCTION walbrook.place_within(source text, bytes_max bigint) RETURNS walbrook.place
LANGUAGE sql STABLE AS $$
    SELECT ROW(g.high_lsn, g.high_idx)::walbrook.place
      FROM (SELECT l.*, coalesce(sum(l.bytes) OVER (ORDER BY l.first_batch DESC
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS behind
              FROM walbrook.log_segments l WHERE l.source = place_within.source) g
     WHERE g.behind <= place_within.bytes_max
     ORDER BY g.first_batch LIMIT 1
$$;

COMMENT ON FUNCTION walbrook.place_within IS 'The first segment boundary of a log with no more than bytes_max behind it.';

-- A place in the log by the time of commit: the start of the segment that holds it.
CREATE OR REPLACE FUNCTION walbrook.place_at(source text, at timestamptz) RETURNS walbrook.place
LANGUAGE plpgsql AS $$
DECLARE
    begins timestamptz;
    ends timestamptz;
    place walbrook.place;
BEGIN
    SELECT min(g.commit_from), max(g.commit_to) INTO begins, ends
      FROM walbrook.log_segments g WHERE g.source = place_at.source;
    IF begins IS NULL OR at < begins THEN
        RAISE EXCEPTION 'the change log of % holds nothing from before %', place_at.source,
                        coalesce(begins::text, 'now')
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'to begin with the first change that it has, say to_earliest => true';
    END IF;
    IF at > ends THEN
        RAISE EXCEPTION 'the change log of % ends with a change of %, before %', place_at.source,
                        ends, at
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'nothing was committed since; give an earlier time';
    END IF;
    SELECT g.first_lsn, g.first_idx INTO place
      FROM walbrook.log_segments g
     WHERE g.source = place_at.source AND g.commit_to >= at
     ORDER BY g.first_batch LIMIT 1;
    RETURN place;
END
$$;
