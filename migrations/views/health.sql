CREATE OR REPLACE VIEW walbrook.health AS
SELECT source, consumer, kind, severity, what, fix, since, seen_at
  FROM walbrook.health_events
 WHERE resolved_at IS NULL
 ORDER BY since DESC, id DESC;

COMMENT ON VIEW walbrook.health IS 'What is wrong now, the newest first; no rows: all is well.';
