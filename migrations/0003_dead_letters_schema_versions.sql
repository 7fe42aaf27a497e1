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

-- Compressing a payload of hundreds of megabytes takes longer than all the rest of a settlement.
ALTER TABLE walbrook.dead_letters ALTER COLUMN payload SET STORAGE EXTERNAL;

COMMENT ON TABLE walbrook.dead_letters IS 'Changes that a consumer was not sent because nothing can be made of them; the consumer has gone on. Deleting a row acknowledges it.';
COMMENT ON COLUMN walbrook.dead_letters.commit_lsn IS 'With commit_idx: the cursor of the change.';
COMMENT ON COLUMN walbrook.dead_letters.kind IS 'At which step it failed; decode: a value could not be read.';
COMMENT ON COLUMN walbrook.dead_letters.error IS 'What was wrong, with table, column and cursor.';
COMMENT ON COLUMN walbrook.dead_letters.payload IS 'The pgoutput message of the change as the source sent it.';
COMMENT ON COLUMN walbrook.dead_letters.schema IS 'The Relation message that it was written with, as the change log keeps it; null for a logical message.';
COMMENT ON COLUMN walbrook.dead_letters.dead_at IS 'When the consumer went on without it.';

CREATE TABLE walbrook.schema_versions (
    source           text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    relation         oid NOT NULL,
    version          integer NOT NULL,
    table_schema     text NOT NULL,
    table_name       text NOT NULL,
    columns          jsonb NOT NULL,
    replica_identity text NOT NULL CHECK (replica_identity IN ('default', 'nothing', 'full', 'index')),
    key              text[] NOT NULL,
    change           jsonb,
    schema           bytea NOT NULL,
    since_lsn        pg_lsn NOT NULL,
    since_idx        bigint NOT NULL,
    commit_timestamp timestamptz NOT NULL,
    announced_lsn    pg_lsn,
    announced_idx    bigint,
    seen_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (source, relation, version),
    UNIQUE (source, relation, since_lsn, since_idx),
    UNIQUE (source, announced_lsn, announced_idx),
    CHECK ((version = 1) = (change IS NULL) AND (change IS NULL) = (announced_lsn IS NULL)
           AND (announced_lsn IS NULL) = (announced_idx IS NULL))
);

COMMENT ON TABLE walbrook.schema_versions IS 'The versions of each table that changes were read of, and what each changed. The reader writes a version before its first change is in the log.';
COMMENT ON COLUMN walbrook.schema_versions.relation IS 'The table''s oid in the source: it stays when the table is renamed.';
COMMENT ON COLUMN walbrook.schema_versions.version IS 'Counts from 1, the version in which the table was first seen.';
COMMENT ON COLUMN walbrook.schema_versions.columns IS 'In order: name, type, and whether it is part of the key.';
COMMENT ON COLUMN walbrook.schema_versions.key IS 'The columns of the key, in key order.';
COMMENT ON COLUMN walbrook.schema_versions.change IS 'What differs from the version before: the record of its schema_change message. Null for the first.';
COMMENT ON COLUMN walbrook.schema_versions.schema IS 'The Relation message as the change log keeps it.';
COMMENT ON COLUMN walbrook.schema_versions.since_lsn IS 'With since_idx: the cursor of the first change that was written with it.';
COMMENT ON COLUMN walbrook.schema_versions.commit_timestamp IS 'When the transaction of that change was committed.';
COMMENT ON COLUMN walbrook.schema_versions.announced_lsn IS 'With announced_idx: the cursor of its schema_change message. Null for the first.';
