-- What a trace of one change needs: the attempts of a message that waits, and where a consumer began.

ALTER TABLE walbrook.events ADD COLUMN attempts jsonb;

COMMENT ON COLUMN walbrook.events.attempts IS 'Its last ten refusals: when, the how many-th it was, and what the destination answered, without row values.';

ALTER TABLE walbrook.consumers ADD COLUMN begun_lsn pg_lsn, ADD COLUMN begun_idx bigint;

COMMENT ON COLUMN walbrook.consumers.begun_lsn IS 'With begun_idx: where it began, or was moved back to; it was never to get what lies below. Null: nobody noted it.';

-- Live traces: somebody watches what a consumer''s expressions make of its changes, for a bounded time.
-- Samples have row values in them, so both tables are unlogged, and a trace takes its samples along.
CREATE UNLOGGED TABLE walbrook.live_traces (
    id         uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    consumer   integer NOT NULL REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    per_second integer NOT NULL CHECK (per_second BETWEEN 1 AND 100),
    begun_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    ends_at    timestamptz NOT NULL
);

CREATE INDEX live_traces_consumer ON walbrook.live_traces (consumer);

CREATE UNLOGGED TABLE walbrook.live_samples (
    number  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    trace   uuid NOT NULL REFERENCES walbrook.live_traces (id) ON DELETE CASCADE,
    sample  text NOT NULL
);

CREATE INDEX live_samples_trace ON walbrook.live_samples (trace, number);

COMMENT ON TABLE walbrook.live_traces IS 'Who is being watched, and until when. A row is removed when its time is over, with its samples.';
COMMENT ON COLUMN walbrook.live_traces.id IS 'Whoever has it may fetch the samples; nobody else is shown them.';
COMMENT ON TABLE walbrook.live_samples IS 'Samples that were not fetched yet, row values included; fetching removes them.';
COMMENT ON COLUMN walbrook.live_samples.sample IS 'JSON: the cursor, what the expressions saw, what they made of it, and whether it passed.';
