CREATE OR REPLACE VIEW walbrook.backfill_progress AS
SELECT b.id, b.source, b.consumer, b.table_schema, b.table_name, b.reload, b.state, b.reason, b.waits_for,
       b.waits_since, b.error,
       b.planned, c.chunks, c.chunks_done, coalesce(c.read, 0) AS rows_read, coalesce(c.delivered, 0) AS rows,
       coalesce(c.dropped, 0) AS dropped, coalesce(c.merged, 0) AS merged,
       coalesce(c.bytes, 0) AS bytes, b.estimated_rows, b.estimated_bytes,
       CASE WHEN b.state = 'done' THEN 1.0
            WHEN c.chunks > 0 THEN round(c.chunks_done::numeric / c.chunks, 4)
            ELSE 0 END AS fraction,
       r.rate AS rows_per_second,
       CASE WHEN b.state = 'running' AND r.rate > 0
            THEN greatest(b.estimated_rows - coalesce(c.delivered, 0), 0) / r.rate END AS seconds_left,
       c.oldest_snapshot, b.requested_at, b.started_at, b.finished_at, coalesce(b.request, b.id) AS request
  FROM walbrook.backfills b
  LEFT JOIN LATERAL (
       SELECT count(*) AS chunks, count(*) FILTER (WHERE k.state = 'done') AS chunks_done,
              sum(k.rows) FILTER (WHERE k.kind NOT IN ('begin', 'swap', 'drop'))::bigint AS read,
              sum(k.delivered) FILTER (WHERE k.kind NOT IN ('begin', 'swap', 'drop'))::bigint AS delivered,
              sum(k.dropped)::bigint AS dropped, sum(k.merged)::bigint AS merged, sum(k.bytes)::bigint AS bytes,
              min(k.read_at) FILTER (WHERE k.state IN ('read', 'delivering')) AS oldest_snapshot
         FROM walbrook.backfill_chunks k WHERE k.backfill = b.id AND k.state <> 'replaced') c ON true
  LEFT JOIN LATERAL (
       SELECT coalesce(c.delivered, 0) / nullif(extract(epoch FROM
              coalesce(b.finished_at, clock_timestamp()) - b.started_at), 0) AS rate) r ON true;

COMMENT ON VIEW walbrook.backfill_progress IS 'How far each backfill is, how fast, and what it waits for. reload: its rows go into a shadow of the table, which is swapped in at the end. oldest_snapshot: when the oldest chunk was read that is not delivered; no transaction is held open for it. request: the backfill that was asked for; those of the partitions of a table have its number.';

CREATE OR REPLACE VIEW walbrook.verified AS
SELECT DISTINCT ON (v.source, v.consumer, v.table_schema, v.table_name)
       v.source, v.consumer, v.table_schema, v.table_name, e.position AS verified_through,
       e.finished_at AS verified_at, v.id AS last_verification, v.state AS last_state,
       v.missing + v.extra + v.different - coalesce(v.repaired, 0) AS last_differences
  FROM walbrook.verifications v
  LEFT JOIN LATERAL (
       SELECT w.position, w.finished_at FROM walbrook.verifications w
        WHERE w.source = v.source AND w.consumer = v.consumer AND w.table_schema = v.table_schema
          AND w.table_name = v.table_name AND w.state = 'done' AND w.changing = 0
          AND w.missing + w.extra + w.different = coalesce(w.repaired, 0)
        ORDER BY w.position DESC LIMIT 1) e ON true
 WHERE v.table_name IS NOT NULL
 ORDER BY v.source, v.consumer, v.table_schema, v.table_name, v.id DESC;

COMMENT ON VIEW walbrook.verified IS 'Per consumer and table: up to which position all rows were found equal (verified_through, null if never), and what the latest comparison came to.';

CREATE OR REPLACE VIEW walbrook.repaired_tables AS
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

CREATE OR REPLACE VIEW walbrook.repair_progress AS
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
