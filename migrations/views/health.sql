CREATE OR REPLACE VIEW walbrook.health AS
SELECT source, consumer, kind, severity, what, fix, since, seen_at,
       'docs/operations.md#' || kind AS link
  FROM walbrook.health_events
 WHERE resolved_at IS NULL
 ORDER BY since DESC, id DESC;

COMMENT ON VIEW walbrook.health IS 'What is wrong now, the newest first; no rows: all is well.';

-- Of several open events an error counts before a warning, and of those the oldest.
CREATE OR REPLACE VIEW walbrook.health_states AS
SELECT o.source, o.consumer, coalesce(w.severity, 'ok') AS health,
       coalesce(w.since, greatest(o.created_at, r.at)) AS since,
       w.kind, w.what AS cause, w.fix AS remedy, 'docs/operations.md#' || w.kind AS link,
       coalesce(w.open, 0) AS open_events
  FROM (SELECT name AS source, NULL::text AS consumer, created_at FROM walbrook.sources
         UNION ALL
        SELECT source, name, created_at FROM walbrook.consumers WHERE active) o
  LEFT JOIN LATERAL
       (SELECT h.severity, h.since, h.kind, h.what, h.fix, count(*) OVER () AS open
          FROM walbrook.health_events h
         WHERE h.source = o.source AND h.consumer IS NOT DISTINCT FROM o.consumer
           AND h.resolved_at IS NULL
         ORDER BY h.severity, h.since LIMIT 1) w ON true
  LEFT JOIN LATERAL
       (SELECT max(e.resolved_at) AS at FROM walbrook.health_events e
         WHERE e.source = o.source AND e.consumer IS NOT DISTINCT FROM o.consumer
           AND e.resolved_at IS NOT NULL) r ON w.kind IS NULL
 ORDER BY o.source, o.consumer NULLS FIRST;

COMMENT ON VIEW walbrook.health_states IS 'One row per source and per active consumer: whether it is well, since when, and else the gravest cause and what to do.';
