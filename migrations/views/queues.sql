CREATE OR REPLACE VIEW walbrook.queues AS
SELECT c.source, c.name AS consumer, q.waiting, q.refused, q.oldest, q.next_due, f.first_refused
  FROM walbrook.consumers c
 CROSS JOIN LATERAL (
       SELECT count(*) AS waiting, count(e.error) AS refused, min(e.queued_at) AS oldest,
              min(e.due_at) AS next_due
         FROM walbrook.events e WHERE e.consumer = c.id) q
  LEFT JOIN LATERAL (
       -- Not its error, which may quote the row.
       SELECT format('%s%s, refused for %s', e.commit_lsn || ':' || e.commit_idx,
                     ' of table ' || nullif(e.table_schema || '.' || e.table_name, '.'),
                     CASE e.error_kind WHEN 'poison' THEN 'its content'
                                       ELSE 'a reason that may pass' END)
              AS first_refused
         FROM walbrook.events e WHERE e.consumer = c.id AND e.error IS NOT NULL
        ORDER BY e.commit_lsn, e.commit_idx LIMIT 1) f ON true
 WHERE q.waiting > 0;

COMMENT ON VIEW walbrook.queues IS 'Push consumers for which messages wait: how many, how many of them were refused, since when, when the next is tried, and cursor, table and kind of the first that was refused.';

-- ------------------------------------------------------------------------------------------------
-- For operators: who holds what; a dead letter back into the queue; the queue moved back.
CREATE OR REPLACE VIEW walbrook.leases AS
SELECT c.source, c.name AS consumer, h.commit_lsn || ':' || h.commit_idx AS cursor, h.lease_id,
       h.holder, h.lease_until, h.deliveries, h.lease_until <= clock_timestamp() AS expired
  FROM (SELECT f.consumer, f.commit_lsn, f.commit_idx, f.lease_id, f.holder, f.lease_until, f.deliveries
          FROM walbrook.pull_in_flight f WHERE f.lease_until IS NOT NULL
         UNION ALL
        SELECT e.consumer, e.commit_lsn, e.commit_idx, e.lease_id, e.holder, e.lease_until, e.deliveries
          FROM walbrook.events e WHERE e.lease_until IS NOT NULL) h
  JOIN walbrook.consumers c ON c.id = h.consumer;

COMMENT ON VIEW walbrook.leases IS 'Who holds which message, until when; expired: no worker has taken it since.';
