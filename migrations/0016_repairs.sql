-- Repairs: after a lost slot, rows that changed meanwhile are read again, and rows that are gone are found.

CREATE TABLE walbrook.horizons (
    source   text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    lsn      pg_lsn NOT NULL,
    xid      bigint NOT NULL,
    noted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (source, lsn)
);

COMMENT ON TABLE walbrook.horizons IS 'Which transactions had ended at some places of a source''s WAL, noted while it is read. A repair needs the last one at or below a consumer''s cursor.';
COMMENT ON COLUMN walbrook.horizons.xid IS 'Every transaction below this number (64 bits) had ended, and stands below lsn in the WAL.';

CREATE TABLE walbrook.repairs (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source   text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    found    text NOT NULL,
    deletes  text NOT NULL CHECK (deletes IN ('find', 'skip')),
    to_lsn   pg_lsn NOT NULL,
    begun_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

COMMENT ON TABLE walbrook.repairs IS 'One row per repair of a source whose slot had lost changes.';
COMMENT ON COLUMN walbrook.repairs.found IS 'What was wrong, as the kind of a health event: slot_missing, slot_lost and so on.';
COMMENT ON COLUMN walbrook.repairs.deletes IS 'find: deleted rows are found for every consumer; skip: where they cannot be found, the consumer does without.';
COMMENT ON COLUMN walbrook.repairs.to_lsn IS 'Where the new slot begins: changes from here on come through it.';

ALTER TABLE walbrook.backfills
    ADD COLUMN repair       bigint REFERENCES walbrook.repairs (id) ON DELETE CASCADE,
    ADD COLUMN since_xid    bigint,
    ADD COLUMN whole_reason text,
    ADD COLUMN find_deletes boolean NOT NULL DEFAULT false,
    ADD COLUMN kept_reason  text;

COMMENT ON COLUMN walbrook.backfills.repair IS 'The repair that asked for it; null: an operator or the configuration did.';
COMMENT ON COLUMN walbrook.backfills.since_xid IS 'Of a repair: only rows that transactions from this one on wrote (xmin); null: the whole table.';
COMMENT ON COLUMN walbrook.backfills.whole_reason IS 'Of a repair: why the whole table is read.';
COMMENT ON COLUMN walbrook.backfills.find_deletes IS 'Whether the keys at the destination are compared with those of the table.';
COMMENT ON COLUMN walbrook.backfills.kept_reason IS 'Of a repair: why deleted rows are not found, so that they stay at the destination.';

-- A repair reads a table whatever backfill of it is under way.
DROP INDEX walbrook.backfills_open;
CREATE UNIQUE INDEX backfills_open
    ON walbrook.backfills (source, consumer, table_schema, table_name, coalesce(repair, 0))
 WHERE state IN ('waiting', 'running', 'paused', 'failed');

ALTER TABLE walbrook.backfill_chunks DROP CONSTRAINT backfill_chunks_kind_check;
ALTER TABLE walbrook.backfill_chunks
    ADD CONSTRAINT backfill_chunks_kind_check CHECK (kind IN ('blocks', 'values', 'keys', 'deletes'));

COMMENT ON COLUMN walbrook.backfill_chunks.kind IS 'blocks: by ctid; values: by a column; keys: rows whose values a change left out, read once more; deletes: keys that the destination has and the table has not.';

ALTER TABLE walbrook.gaps
    ADD COLUMN repair  bigint REFERENCES walbrook.repairs (id) ON DELETE SET NULL,
    ADD COLUMN bridged jsonb;

COMMENT ON COLUMN walbrook.gaps.repair IS 'The repair that bridges it; null: nothing does.';
COMMENT ON COLUMN walbrook.gaps.bridged IS 'How a repair bridges it, as the gap message says it; walbrook.repaired_tables has every table.';

CREATE VIEW walbrook.repaired_tables AS
SELECT b.repair, b.source, b.consumer, b.table_schema, b.table_name, b.id AS backfill, b.state,
       CASE WHEN b.since_xid IS NULL THEN 'whole' ELSE 'xmin' END AS rows_read,
       b.since_xid, b.whole_reason,
       CASE WHEN b.find_deletes THEN 'compared' ELSE 'not found' END AS deletes, b.kept_reason,
       coalesce(c.rows, 0) AS rows, coalesce(c.deleted, 0) AS deleted, b.reason, b.error, b.finished_at
  FROM walbrook.backfills b
  LEFT JOIN LATERAL (
       SELECT sum(k.delivered) FILTER (WHERE k.kind <> 'deletes')::bigint AS rows,
              sum(k.delivered) FILTER (WHERE k.kind = 'deletes')::bigint AS deleted
         FROM walbrook.backfill_chunks k WHERE k.backfill = b.id AND k.state <> 'replaced') c ON true
 WHERE b.repair IS NOT NULL;

COMMENT ON VIEW walbrook.repaired_tables IS 'What each repair does for each consumer and table: which rows are read and why, how deleted ones are found or why not, and how far it is.';

CREATE VIEW walbrook.repair_progress AS
SELECT r.id, r.source, r.found, r.deletes, r.to_lsn,
       CASE WHEN t.failed > 0 THEN 'failed' WHEN t.open > 0 THEN 'running' ELSE 'done' END AS state,
       coalesce(t.tables, 0) AS tables, coalesce(t.tables - t.open, 0) AS tables_done,
       coalesce(t.whole, 0) AS tables_whole, coalesce(t.rows, 0)::bigint AS rows,
       coalesce(t.deleted, 0)::bigint AS deleted, r.begun_at,
       CASE WHEN coalesce(t.open, 0) = 0 THEN coalesce(t.finished_at, r.begun_at) END AS finished_at
  FROM walbrook.repairs r
  LEFT JOIN (
       SELECT repair, count(*) AS tables, count(*) FILTER (WHERE state = 'failed') AS failed,
              count(*) FILTER (WHERE state NOT IN ('done', 'cancelled', 'skipped')) AS open,
              count(*) FILTER (WHERE rows_read = 'whole') AS whole, sum(rows) AS rows,
              sum(deleted) AS deleted, max(finished_at) AS finished_at
         FROM walbrook.repaired_tables GROUP BY repair) t ON t.repair = r.id;

COMMENT ON VIEW walbrook.repair_progress IS 'How far each repair is: tables of all consumers, rows delivered, deletes delivered.';
