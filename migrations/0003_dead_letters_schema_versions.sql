-- Changes that could not be delivered as messages, and the versions that tables went through.

ALTER TABLE walbrook.consumers ADD COLUMN dead bigint NOT NULL DEFAULT 0;

COMMENT ON COLUMN walbrook.consumers.dead IS 'How many changes have ever become dead letters of this consumer.';

CREATE TABLE walbrook.dead_letters (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source           text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    consumer         text NOT NULL,
    commit_lsn       pg_lsn NOT NULL,
    commit_idx       bigint NOT NULL,
    commit_timestamp timestamptz NOT NULL,
    table_schema     text NOT NULL,
    table_name       text NOT NULL,
    action           text NOT NULL,
    kind             text NOT NULL CHECK (kind IN ('decode')),
    error            text NOT NULL,
    payload          bytea NOT NULL,
    schema           bytea,
    dead_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (source, consumer, commit_lsn, commit_idx)
);

COMMENT ON TABLE walbrook.dead_letters IS 'Changes that a consumer was not sent because nothing can be made of them; the consumer has gone on. Deleting a row acknowledges it.';
COMMENT ON COLUMN walbrook.dead_letters.commit_lsn IS 'With commit_idx: the cursor of the change.';
COMMENT ON COLUMN walbrook.dead_letters.kind IS 'At which step it failed; decode: a value could not be read.';
COMMENT ON COLUMN walbrook.dead_letters.error IS 'What was wrong, with table, column and cursor.';
COMMENT ON COLUMN walbrook.dead_letters.payload IS 'The pgoutput message of the change as the source sent it.';
COMMENT ON COLUMN walbrook.dead_letters.schema IS 'The Relation message that it was written with, as the change log keeps it; null for a logical message.';
COMMENT ON COLUMN walbrook.dead_letters.dead_at IS 'When the consumer went on without it.';
