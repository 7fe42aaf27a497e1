-- The change log, what ails a source, and what was given up, as rows.

ALTER TABLE walbrook.sources
    ADD COLUMN timeline        integer,
    ADD COLUMN publication_oid bigint,
    ADD COLUMN durable_lsn     pg_lsn,
    ADD COLUMN durable_idx     bigint,
    ADD COLUMN earliest_lsn    pg_lsn,
    ADD COLUMN earliest_idx    bigint,
    ADD COLUMN evicted_lsn     pg_lsn,
    ADD COLUMN evicted_idx     bigint,
    ADD COLUMN log_bytes       bigint,
    ADD COLUMN heartbeat_at    timestamptz,
    ADD COLUMN heartbeat_lag_s float8,
    ADD COLUMN slot_wal_status text,
    ADD COLUMN slot_safe_bytes bigint;

COMMENT ON COLUMN walbrook.sources.timeline IS 'The timeline that was last read; a higher one is a failover.';
COMMENT ON COLUMN walbrook.sources.publication_oid IS 'Of the publication that is read; another one of that name was made after a gap.';
COMMENT ON COLUMN walbrook.sources.durable_lsn IS 'With durable_idx: everything below is in the change log and on disk.';
COMMENT ON COLUMN walbrook.sources.earliest_lsn IS 'With earliest_idx: the first cursor that the change log can still give.';
COMMENT ON COLUMN walbrook.sources.evicted_lsn IS 'With evicted_idx: below it, unsettled changes were dropped on purpose (on_full: evict).';
COMMENT ON COLUMN walbrook.sources.log_bytes IS 'Size of the change log, all tiers.';
COMMENT ON COLUMN walbrook.sources.heartbeat_at IS 'When the last heartbeat came back through the slot.';
COMMENT ON COLUMN walbrook.sources.heartbeat_lag_s IS 'How long that heartbeat was on its way.';
COMMENT ON COLUMN walbrook.sources.slot_wal_status IS 'As in pg_replication_slots: reserved, extended, unreserved or lost.';
COMMENT ON COLUMN walbrook.sources.slot_safe_bytes IS 'WAL that may still be written before the slot is in danger; null: no limit is set.';

-- What is wrong, since when, and what to do. A condition that ends is resolved, not deleted; a
-- thousand resolved ones are kept of each source.
CREATE TABLE walbrook.health_events (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source      text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    consumer    text,
    kind        text NOT NULL,
    severity    text NOT NULL CHECK (severity IN ('warning', 'error')),
    what        text NOT NULL,
    fix         text NOT NULL DEFAULT '',
    since       timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    resolved_at timestamptz
);

CREATE UNIQUE INDEX health_events_open
    ON walbrook.health_events (source, coalesce(consumer, ''), kind) WHERE resolved_at IS NULL;
CREATE INDEX health_events_resolved
    ON walbrook.health_events (source, id) WHERE resolved_at IS NOT NULL;

COMMENT ON TABLE walbrook.health_events IS 'What was or is wrong with a source or one of its consumers, and what to do about it.';
COMMENT ON COLUMN walbrook.health_events.consumer IS 'Null when it concerns the source as a whole.';
COMMENT ON COLUMN walbrook.health_events.kind IS 'A short name; at most one event of a kind is open for a source and consumer.';
COMMENT ON COLUMN walbrook.health_events.severity IS 'An error needs a person now; a warning will become one if nobody acts.';
COMMENT ON COLUMN walbrook.health_events.seen_at IS 'When it was last found still true (written about every ten seconds).';
COMMENT ON COLUMN walbrook.health_events.resolved_at IS 'When it was found no longer true; null while it is open.';

CREATE VIEW walbrook.health AS
SELECT source, consumer, kind, severity, what, fix, since, seen_at
  FROM walbrook.health_events
 WHERE resolved_at IS NULL
 ORDER BY since DESC, id DESC;

COMMENT ON VIEW walbrook.health IS 'What is wrong now, the newest first; no rows: all is well.';

CREATE TABLE walbrook.log_segments (
    source      text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    first_batch bigint NOT NULL,
    batches     bigint NOT NULL,
    rows        bigint NOT NULL,
    bytes       bigint NOT NULL,
    first_lsn   pg_lsn NOT NULL,
    first_idx   bigint NOT NULL,
    high_lsn    pg_lsn NOT NULL,
    high_idx    bigint NOT NULL,
    commit_from timestamptz,
    commit_to   timestamptz,
    sealed_at   timestamptz,
    tier        text NOT NULL CHECK (tier IN ('active', 'hot', 'cold')),
    location    text NOT NULL,
    PRIMARY KEY (source, first_batch)
);

COMMENT ON TABLE walbrook.log_segments IS 'The segments of each change log, as its reader last reported them.';
COMMENT ON COLUMN walbrook.log_segments.first_lsn IS 'With first_idx: the first cursor in the segment.';
COMMENT ON COLUMN walbrook.log_segments.high_lsn IS 'With high_idx: the cursor that the segment ends before.';
COMMENT ON COLUMN walbrook.log_segments.commit_from IS 'Commit time of its oldest change; null without changes. commit_to: of its newest.';
COMMENT ON COLUMN walbrook.log_segments.sealed_at IS 'Null while it is being written.';
COMMENT ON COLUMN walbrook.log_segments.tier IS 'active: being written; hot: in log.directory; cold: moved to log.tier.';
COMMENT ON COLUMN walbrook.log_segments.location IS 'The directory or URL that holds its files.';

CREATE TABLE walbrook.gaps (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source   text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    consumer text NOT NULL,
    from_lsn pg_lsn NOT NULL,
    from_idx bigint NOT NULL,
    to_lsn   pg_lsn NOT NULL,
    to_idx   bigint NOT NULL,
    reason   text NOT NULL,
    noted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    told_at  timestamptz,
    UNIQUE (source, consumer, from_lsn, from_idx),
    CHECK ((from_lsn, from_idx) < (to_lsn, to_idx))
);

COMMENT ON TABLE walbrook.gaps IS 'What a consumer will never get: every change from the first cursor up to, not including, the second.';
COMMENT ON COLUMN walbrook.gaps.from_lsn IS 'With from_idx: the first cursor that is lost.';
COMMENT ON COLUMN walbrook.gaps.to_lsn IS 'With to_idx: the first cursor that is not.';
COMMENT ON COLUMN walbrook.gaps.reason IS 'Why: what was evicted, or which gap an operator accepted.';
COMMENT ON COLUMN walbrook.gaps.told_at IS 'When the consumer''s sink was sent the gap message; null until then.';

-- The end of a source's WAL: as its reader last saw it, or as it is now where this is its server.
CREATE FUNCTION walbrook.wal_end(s walbrook.sources) RETURNS pg_lsn
LANGUAGE sql AS $$
    SELECT greatest(s.head_lsn, CASE WHEN c.system_identifier::text = s.system_identifier
                                     THEN pg_current_wal_flush_lsn() END)
      FROM pg_control_system() c
$$;

-- For an operator who has read why the source stopped and lets the changes go that the slot lost.
-- Invariant: nothing moves unless the reader found that changes are lost, does not read, and has seen
-- WAL up to the place to move to.
CREATE FUNCTION walbrook.accept_gap(source text, lsn pg_lsn) RETURNS SETOF walbrook.gaps
LANGUAGE plpgsql AS $$
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
                          reason = excluded.reason, noted_at = excluded.noted_at, told_at = NULL
        RETURNING g.*;
    UPDATE walbrook.consumers c
       SET cursor_lsn = accept_gap.lsn, cursor_idx = 0, moved_at = clock_timestamp()
     WHERE c.source = accept_gap.source AND c.active AND c.cursor_lsn < accept_gap.lsn;
    UPDATE walbrook.sources k
       SET restart_lsn = accept_gap.lsn, restart_idx = 0, restart_at = clock_timestamp(),
           publication_oid = NULL, last_error = 'the gap is accepted; start the service'
     WHERE k.name = accept_gap.source;
END
$$;

COMMENT ON FUNCTION walbrook.accept_gap IS 'Move a source that has lost changes, and its consumers, to lsn, recording what they will never get; once its reader has stopped.';
