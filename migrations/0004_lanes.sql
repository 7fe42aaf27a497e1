-- Who is served where, and what a lane is doing. A consumer that fails, falls behind or is moved back
-- leaves the shared lane and catches up in one of its own.

CREATE TABLE walbrook.lanes (
    source      text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    name        text NOT NULL,
    consumers   text[] NOT NULL DEFAULT '{}',
    epoch       bigint NOT NULL DEFAULT 1,
    batch       bigint NOT NULL DEFAULT 0,
    attempts    integer NOT NULL DEFAULT 1,
    cursor_lsn  pg_lsn,
    cursor_idx  bigint,
    rows        bigint,
    took_ms     float8,
    last_error  text,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    moved_at    timestamptz,
    PRIMARY KEY (source, name)
);

COMMENT ON TABLE walbrook.lanes IS 'The streaming queries that serve consumers now: shared, and one or more that catch up.';
COMMENT ON COLUMN walbrook.lanes.name IS 'shared, or catch_up_N while there is one.';
COMMENT ON COLUMN walbrook.lanes.consumers IS 'Whom it serves.';
COMMENT ON COLUMN walbrook.lanes.epoch IS 'Counts the starts of the lane; what an earlier one still tries to settle is refused.';
COMMENT ON COLUMN walbrook.lanes.batch IS 'Micro-batches settled in this epoch; each is settled once.';
COMMENT ON COLUMN walbrook.lanes.attempts IS 'Starts in a row, this one included, without a settled micro-batch since.';
COMMENT ON COLUMN walbrook.lanes.cursor_lsn IS 'With cursor_idx: how far the last settled micro-batch reached.';
COMMENT ON COLUMN walbrook.lanes.rows IS 'Changes in the last settled micro-batch.';
COMMENT ON COLUMN walbrook.lanes.took_ms IS 'How long the last settled micro-batch took.';
COMMENT ON COLUMN walbrook.lanes.last_error IS 'What keeps the lane from moving; null while it moves.';

ALTER TABLE walbrook.consumers
    ADD COLUMN lane text,
    ADD COLUMN lane_reason text,
    ADD COLUMN retry_at timestamptz;

COMMENT ON COLUMN walbrook.consumers.lane IS 'The lane that serves it; null while none does.';
COMMENT ON COLUMN walbrook.consumers.lane_reason IS 'Why it is not in the shared lane; null if it is.';
COMMENT ON COLUMN walbrook.consumers.retry_at IS 'When a lane is started for it again; null unless it waits.';

ALTER TABLE walbrook.sources DROP COLUMN lane_error;

ALTER TABLE walbrook.dead_letters DROP CONSTRAINT dead_letters_kind_check;
ALTER TABLE walbrook.dead_letters
    ADD CONSTRAINT dead_letters_kind_check CHECK (kind IN ('decode', 'expression', 'delivery'));

COMMENT ON COLUMN walbrook.dead_letters.kind IS 'At which step it failed; decode: it could not be read; expression: the consumer''s filter, transform or routing failed on it; delivery: whatever delivered it broke.';
