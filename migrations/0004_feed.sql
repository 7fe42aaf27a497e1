-- What the feed of a source is doing, and what each consumer's worker is doing.

CREATE TABLE walbrook.feeds (
    source      text PRIMARY KEY REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    run         bigint NOT NULL DEFAULT 1,
    attempts    integer NOT NULL DEFAULT 1,
    cursor_lsn  pg_lsn,
    cursor_idx  bigint,
    plan        text CHECK (plan IN ('driver', 'executors', 'cluster')),
    rows        bigint,
    decode_ms   float8,
    ranges      integer NOT NULL DEFAULT 0,
    bytes       bigint NOT NULL DEFAULT 0,
    settle_ms   float8,
    last_error  text,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    settled_at  timestamptz
);

COMMENT ON TABLE walbrook.feeds IS 'The decoded ranges at the head of each source''s log, which all consumers that are there share.';
COMMENT ON COLUMN walbrook.feeds.run IS 'Counts the processes that served the source; what an earlier one still tries to settle is refused.';
COMMENT ON COLUMN walbrook.feeds.attempts IS 'Processes in a row, this one included, that have not decoded and settled anything.';
COMMENT ON COLUMN walbrook.feeds.cursor_lsn IS 'With cursor_idx: how far the log was read.';
COMMENT ON COLUMN walbrook.feeds.plan IS 'Where the last range was decoded: in the driver, on executors of its machine, or on a cluster.';
COMMENT ON COLUMN walbrook.feeds.rows IS 'Changes in the last range.';
COMMENT ON COLUMN walbrook.feeds.decode_ms IS 'How long decoding the last range took.';
COMMENT ON COLUMN walbrook.feeds.ranges IS 'Ranges that wait in the feed for a worker.';
COMMENT ON COLUMN walbrook.feeds.bytes IS 'Bytes of decoded rows that wait in the driver''s memory.';
COMMENT ON COLUMN walbrook.feeds.settle_ms IS 'How long the last settling transaction took.';
COMMENT ON COLUMN walbrook.feeds.last_error IS 'What keeps the feed from moving; null while it moves.';
COMMENT ON COLUMN walbrook.feeds.settled_at IS 'When cursors were last settled.';

ALTER TABLE walbrook.consumers
    ADD COLUMN state text CHECK (state IN ('live', 'catching_up', 'waiting', 'paused', 'failed')),
    ADD COLUMN state_reason text,
    ADD COLUMN retry_at timestamptz,
    ADD COLUMN attempts integer NOT NULL DEFAULT 0,
    ADD COLUMN deliver_ms float8;

COMMENT ON COLUMN walbrook.consumers.state IS 'What its worker does. live: it is at the head of the log; catching_up: it reads the log by itself; waiting: until retry_at; paused: by an operator; failed: an operator has to act. As the last process that served it left it; null before the first, and while it is not active.';
COMMENT ON COLUMN walbrook.consumers.state_reason IS 'Why it is not live; null if it is.';
COMMENT ON COLUMN walbrook.consumers.retry_at IS 'When its worker tries again; null unless it waits.';
COMMENT ON COLUMN walbrook.consumers.attempts IS 'Processes in a row, the running one included, that have settled nothing for it.';
COMMENT ON COLUMN walbrook.consumers.deliver_ms IS 'How long its last settled delivery took.';

ALTER TABLE walbrook.dead_letters DROP CONSTRAINT dead_letters_kind_check;
ALTER TABLE walbrook.dead_letters
    ADD CONSTRAINT dead_letters_kind_check CHECK (kind IN ('decode', 'expression', 'delivery'));

COMMENT ON COLUMN walbrook.dead_letters.kind IS 'At which step it failed; decode: it could not be read; expression: the consumer''s filter, transform or routing failed on it; delivery: whatever delivered it broke.';
