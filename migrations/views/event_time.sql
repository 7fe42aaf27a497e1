CREATE OR REPLACE VIEW walbrook.watermarks AS
SELECT c.name AS consumer, c.source, p.table_name AS "table", walbrook.time_of(p.watermark) AS watermark,
       walbrook.time_of(greatest(p.seen_to, p.last_event)) AS last_event,
       CASE WHEN p.marked_idle THEN least(p.idle_since, p.marked_at) ELSE p.idle_since END AS idle_since,
       p.marked_idle, p.buffered, p.late AS late_count, walbrook.time_of(e.watermark) AS released_to,
       walbrook.time_of(greatest(e.pushed_to, s.pushed_to)) AS pushed_to, p.shown_at
  FROM walbrook.event_partitions p
  JOIN walbrook.consumers c ON c.id = p.consumer
  LEFT JOIN walbrook.event_sources s ON s.consumer = c.id
  LEFT JOIN walbrook.event_time e ON e.consumer = c.name
 WHERE c.active;

COMMENT ON VIEW walbrook.watermarks IS 'Consumers in event-time order, table by table: its watermark, since when it is idle, how many of its changes wait in the buffer and how many came late. released_to is the consumer''s own watermark, pushed_to what an operator pushed it or its database to. Written once a second.';
