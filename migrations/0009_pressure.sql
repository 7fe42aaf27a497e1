-- How much more there is to deliver than can be delivered, and what is done about it.

CREATE TABLE walbrook.pressure (
    source        text PRIMARY KEY REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    level         integer NOT NULL,
    since         timestamptz NOT NULL DEFAULT clock_timestamp(),
    backlog_rows  bigint NOT NULL,
    backlog_bytes bigint NOT NULL,
    latency_s     float8 NOT NULL,
    busy_ratio    float8 NOT NULL,
    widened_by    float8 NOT NULL,
    deferred      text[] NOT NULL,
    slots         integer NOT NULL,
    slots_busy    integer NOT NULL,
    waiting       integer NOT NULL,
    measured_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (level BETWEEN 0 AND 2)
) WITH (fillfactor = 50);

COMMENT ON TABLE walbrook.pressure IS 'One row per source: what waits in its log for the workers at the head of it, and what is done if that is too much. Written when it changes, at most once a second.';
COMMENT ON COLUMN walbrook.pressure.level IS '0: none; 1: micro-batches are widened; 2: the consumers of lowest priority are deferred.';
COMMENT ON COLUMN walbrook.pressure.since IS 'Since when it has this level.';
COMMENT ON COLUMN walbrook.pressure.backlog_rows IS 'Changes in the log that a worker at its head has not delivered.';
COMMENT ON COLUMN walbrook.pressure.backlog_bytes IS 'Their size in the log.';
COMMENT ON COLUMN walbrook.pressure.latency_s IS 'How long the oldest of them has been there.';
COMMENT ON COLUMN walbrook.pressure.busy_ratio IS 'Share of the last seconds in which a range was decoded or a worker at the head of the log had something to deliver.';
COMMENT ON COLUMN walbrook.pressure.widened_by IS 'How many times longer than spark.micro_batch_target_ms a micro-batch may take.';
COMMENT ON COLUMN walbrook.pressure.deferred IS 'Consumers that wait until there is less to do, for a minute at most; their cursors stay where they are.';
COMMENT ON COLUMN walbrook.pressure.slots IS 'spark.delivery_slots: deliveries that may be under way at once, of all sources together.';
COMMENT ON COLUMN walbrook.pressure.slots_busy IS 'How many of them deliver to consumers of this source.';
COMMENT ON COLUMN walbrook.pressure.waiting IS 'Deliveries of this source that wait for a slot.';
