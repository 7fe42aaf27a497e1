-- The restart cursor of each source (consumer is null) and the cursor of each active consumer.
-- lag_seconds is 0 when everything that the log holds is settled, else the age of the last
-- settled change. A reader that does not read is behind too, by the clock: the log does not show it.
CREATE OR REPLACE VIEW walbrook.cursors AS
SELECT s.name AS source,
       NULL::text AS consumer,
       s.restart_lsn || ':' || s.restart_idx AS cursor,
       s.restart_lsn AS lsn,
       s.restart_idx AS idx,
       greatest(s.head_lsn - s.restart_lsn, 0)::bigint AS lag_bytes,
       greatest(
           CASE WHEN ((s.restart_lsn, s.restart_idx) < (s.log_lsn, s.log_idx)) IS NOT TRUE THEN 0
                ELSE extract(epoch FROM clock_timestamp() - s.restart_at) END,
           walbrook.reader_lag(s.current_at))::float8 AS lag_seconds,
       s.restart_at AS moved_at
  FROM walbrook.sources s
UNION ALL
SELECT c.source,
       c.name,
       c.cursor_lsn || ':' || c.cursor_idx,
       c.cursor_lsn,
       c.cursor_idx,
       greatest(s.head_lsn - c.cursor_lsn, 0)::bigint,
       greatest(
           CASE WHEN ((c.cursor_lsn, c.cursor_idx) < (s.log_lsn, s.log_idx)) IS NOT TRUE THEN 0
                ELSE extract(epoch FROM clock_timestamp() - coalesce(c.settled_commit, c.moved_at)) END,
           walbrook.reader_lag(s.current_at))::float8,
       c.moved_at
  FROM walbrook.consumers c
  JOIN walbrook.sources s ON s.name = c.source
 WHERE c.active;

COMMENT ON VIEW walbrook.cursors IS 'Where every source and consumer stands, how far behind, and when it last moved.';

CREATE OR REPLACE VIEW walbrook.backlogs AS
SELECT c.source, c.name AS consumer, walbrook.backlog(c.source, c.cursor_lsn, c.cursor_idx) AS bytes,
       c.backlog_max AS max_bytes, c.backlog_on_full AS on_full, c.backlog_excused AS excused,
       c.disabled_at, c.disabled_reason
  FROM walbrook.consumers c
 WHERE c.active;

COMMENT ON VIEW walbrook.backlogs IS 'How much of the change log each active consumer has before it, in whole segments, and its bound.';
