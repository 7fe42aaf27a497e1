-- Pull consumers: the steps of a claim; pull_claims.sql has their invariants.

-- Those that this claim found behind an earlier one (due_at is its moment) wait for it. One whose
-- earlier ones are all being acknowledged right now is looked at again soon instead: the transaction that does
-- that has not seen that it waits.
CREATE OR REPLACE FUNCTION walbrook.hold_back(consumer integer, lease bigint, moment timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    lsns  pg_lsn[];
    idxs  bigint[];
    found boolean[];
BEGIN
    -- In two steps: what a statement itself has changed it can no longer lock. Of each group, and of
    -- each table, the first that is not locked is looked for once: an acknowledgement may lock thousands.
    EXECUTE format($query$
        WITH waiters AS MATERIALIZED (
            SELECT w.commit_lsn, w.commit_idx, w.group_id, w.whole_table, w.table_schema, w.table_name,
                   row_number() OVER (PARTITION BY w.group_id ORDER BY w.commit_lsn, w.commit_idx) = 1
                   AS of_group,
                   row_number() OVER (PARTITION BY w.table_schema, w.table_name
                                      ORDER BY w.commit_lsn, w.commit_idx) = 1 AS of_table,
                   w.whole_table
                   AND row_number() OVER (PARTITION BY w.table_schema, w.table_name, w.whole_table
                                          ORDER BY w.commit_lsn, w.commit_idx) = 1 AS of_whole
              FROM walbrook.pull_in_flight_%1$s w WHERE w.consumer = %1$s AND w.due_at = $2),
        looked AS MATERIALIZED (
            SELECT w.*, g.place AS in_group, t.place AS in_table, a.place AS in_whole
              FROM waiters w
              LEFT JOIN LATERAL (
                   SELECT ROW(e.commit_lsn, e.commit_idx) AS place FROM walbrook.pull_in_flight_%1$s e
                    WHERE w.of_group AND e.consumer = %1$s AND e.group_id = w.group_id
                      AND e.lease_id IS DISTINCT FROM $1
                    ORDER BY e.commit_lsn, e.commit_idx LIMIT 1 FOR KEY SHARE SKIP LOCKED) g ON true
              LEFT JOIN LATERAL (
                   SELECT ROW(e.commit_lsn, e.commit_idx) AS place FROM walbrook.pull_in_flight_%1$s e
                    WHERE w.of_table AND e.consumer = %1$s AND e.whole_table
                      AND e.table_schema = w.table_schema AND e.table_name = w.table_name
                      AND e.lease_id IS DISTINCT FROM $1
                    ORDER BY e.commit_lsn, e.commit_idx LIMIT 1 FOR KEY SHARE SKIP LOCKED) t ON true
              LEFT JOIN LATERAL (
                   SELECT ROW(e.commit_lsn, e.commit_idx) AS place FROM walbrook.pull_in_flight_%1$s e
                    WHERE w.of_whole AND e.consumer = %1$s
                      AND e.table_schema = w.table_schema AND e.table_name = w.table_name
                      AND e.lease_id IS DISTINCT FROM $1
                    ORDER BY e.commit_lsn, e.commit_idx LIMIT 1 FOR KEY SHARE SKIP LOCKED) a ON true),
        judged AS (
            SELECT l.commit_lsn, l.commit_idx,
                   first_value(l.in_group) OVER (PARTITION BY l.group_id ORDER BY l.commit_lsn, l.commit_idx)
                   < ROW(l.commit_lsn, l.commit_idx) AS is_behind,
                   first_value(l.in_table) OVER (PARTITION BY l.table_schema, l.table_name
                                                 ORDER BY l.commit_lsn, l.commit_idx)
                   < ROW(l.commit_lsn, l.commit_idx) AS is_behind_whole,
                   l.whole_table
                   AND first_value(l.in_whole) OVER (PARTITION BY l.table_schema, l.table_name, l.whole_table
                                                     ORDER BY l.commit_lsn, l.commit_idx)
                       < ROW(l.commit_lsn, l.commit_idx) AS is_behind_table
              FROM looked l)
        SELECT array_agg(j.commit_lsn), array_agg(j.commit_idx),
               array_agg(coalesce(j.is_behind, false) OR coalesce(j.is_behind_whole, false)
                         OR coalesce(j.is_behind_table, false))
          FROM judged j
        $query$, hold_back.consumer) INTO lsns, idxs, found USING lease, moment;
    EXECUTE format($query$
        UPDATE walbrook.pull_in_flight_%1$s f
           SET due_at = CASE WHEN NOT u.found THEN $4 + interval '20 milliseconds' END
          FROM unnest($1, $2, $3) u (lsn, idx, found)
         WHERE f.consumer = %1$s AND f.commit_lsn = u.lsn AND f.commit_idx = u.idx
        $query$, hold_back.consumer) USING lsns, idxs, found, moment;
END
$$;

-- What came back or was not acknowledged in time, in cursor order, and with each what waits for it.
CREATE OR REPLACE FUNCTION walbrook.claim_again(settings walbrook.pull_settings, last walbrook.pull_claims, batch_size integer,
                                                room integer, lease bigint, moment timestamptz,
                                                until timestamptz, holder text)
RETURNS SETOF walbrook.received
LANGUAGE plpgsql AS $$
DECLARE
    id        integer := settings.consumer;
    take_lsns pg_lsn[];
    take_idxs bigint[];
    dead_lsns pg_lsn[];
    dead_idxs bigint[];
    wait_lsns pg_lsn[];
    wait_idxs bigint[];
BEGIN
    EXECUTE format($query$
        WITH due AS MATERIALIZED (
            SELECT f.*
              FROM (SELECT f.commit_lsn, f.commit_idx FROM walbrook.pull_in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.due_at <= $2
                     UNION ALL
                    SELECT f.commit_lsn, f.commit_idx FROM walbrook.pull_in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.lease_until > $1 AND f.lease_until <= $2
                     ORDER BY 1, 2) c,
                   LATERAL (SELECT f.commit_lsn, f.commit_idx, f.group_id, f.whole_table,
                                   f.table_schema, f.table_name, f.deliveries
                              FROM walbrook.pull_in_flight_%1$s f
                             WHERE f.consumer = %1$s
                               AND f.commit_lsn = c.commit_lsn AND f.commit_idx = c.commit_idx
                               AND coalesce(f.lease_until, f.due_at) <= $2
                             LIMIT 1 FOR UPDATE SKIP LOCKED) f
             LIMIT $3),
        followers AS MATERIALIZED (
            SELECT w.*
              FROM (SELECT DISTINCT d.group_id FROM due d WHERE d.group_id IS NOT NULL) g,
                   LATERAL (SELECT f.commit_lsn, f.commit_idx, f.group_id, f.whole_table,
                                   f.table_schema, f.table_name, f.deliveries
                              FROM walbrook.pull_in_flight_%1$s f
                             WHERE f.consumer = %1$s AND f.group_id = g.group_id
                               AND f.lease_until IS NULL AND f.due_at IS NULL
                             ORDER BY f.commit_lsn, f.commit_idx LIMIT $4
                               FOR UPDATE SKIP LOCKED) w),
        together AS MATERIALIZED (
            SELECT *, true AS is_due FROM due UNION ALL SELECT *, false FROM followers),
        -- Of each group the first that is in flight and not among these.
        outside AS MATERIALIZED (
            SELECT g.group_id, e.commit_lsn, e.commit_idx
              FROM (SELECT DISTINCT t.group_id FROM together t WHERE t.group_id IS NOT NULL) g,
                   LATERAL (SELECT f.commit_lsn, f.commit_idx FROM walbrook.pull_in_flight_%1$s f
                             WHERE f.consumer = %1$s AND f.group_id = g.group_id
                               AND (f.commit_lsn, f.commit_idx)
                                   NOT IN (SELECT t.commit_lsn, t.commit_idx FROM together t)
                             ORDER BY f.commit_lsn, f.commit_idx LIMIT 1) e),
        seen AS (
            SELECT t.*, r.bytes,
                   coalesce((o.commit_lsn, o.commit_idx) < (t.commit_lsn, t.commit_idx), false)
                   OR EXISTS (SELECT FROM walbrook.pull_in_flight_%1$s e
                               WHERE e.consumer = %1$s AND e.whole_table
                                 AND e.table_schema = t.table_schema AND e.table_name = t.table_name
                                 AND (e.commit_lsn, e.commit_idx) < (t.commit_lsn, t.commit_idx)
                                 AND (e.commit_lsn, e.commit_idx)
                                     NOT IN (SELECT x.commit_lsn, x.commit_idx FROM together x))
                   OR t.whole_table
                      AND EXISTS (SELECT FROM walbrook.pull_in_flight_%1$s e
                                   WHERE e.consumer = %1$s
                                     AND e.table_schema = t.table_schema AND e.table_name = t.table_name
                                     AND (e.commit_lsn, e.commit_idx) < (t.commit_lsn, t.commit_idx)
                                     AND (e.commit_lsn, e.commit_idx)
                                         NOT IN (SELECT x.commit_lsn, x.commit_idx FROM together x))
                   AS is_behind
              FROM together t
              JOIN walbrook.pull_messages_%1$s r
                ON r.consumer = %1$s AND r.commit_lsn = t.commit_lsn AND r.commit_idx = t.commit_idx
              LEFT JOIN outside o ON o.group_id = t.group_id),
        judged AS (
            SELECT s.*, s.is_behind
                   OR coalesce(bool_or(s.is_behind AND s.whole_table)
                               OVER (PARTITION BY s.table_schema, s.table_name
                                     ORDER BY s.commit_lsn, s.commit_idx), false) AS waits
              FROM seen s),
        fates AS (
            SELECT j.*, CASE WHEN j.waits THEN 'wait'
                             WHEN j.deliveries >= $5 THEN 'dead' ELSE 'take' END AS fate
              FROM judged j),
        counted AS (
            SELECT f.*, row_number() OVER place AS n, sum(f.bytes) OVER place - f.bytes AS bytes_before
              FROM fates f
            WINDOW place AS (PARTITION BY f.fate ORDER BY f.commit_lsn, f.commit_idx))
        SELECT array_agg(commit_lsn) FILTER (WHERE fate = 'take' AND n <= $3 AND bytes_before < walbrook.receive_bytes_max()),
               array_agg(commit_idx) FILTER (WHERE fate = 'take' AND n <= $3 AND bytes_before < walbrook.receive_bytes_max()),
               array_agg(commit_lsn) FILTER (WHERE fate = 'dead'),
               array_agg(commit_idx) FILTER (WHERE fate = 'dead'),
               array_agg(commit_lsn) FILTER (WHERE fate = 'wait' AND is_due),
               array_agg(commit_idx) FILTER (WHERE fate = 'wait' AND is_due)
          FROM counted
        $query$, id)
       INTO take_lsns, take_idxs, dead_lsns, dead_idxs, wait_lsns, wait_idxs
      USING last.swept_to, moment, batch_size, room, settings.max_deliveries;
    IF dead_lsns IS NOT NULL THEN
        PERFORM walbrook.bury_records(id, dead_lsns, dead_idxs, in_claim => true);
    END IF;
    IF take_lsns IS NOT NULL THEN
        RETURN QUERY EXECUTE format($query$
            WITH taken AS (
                UPDATE walbrook.pull_in_flight_%1$s f
                   SET lease_id = $3, lease_until = $4, due_at = NULL, holder = $5,
                       deliveries = f.deliveries + 1
                  FROM unnest($1, $2) u (lsn, idx)
                 WHERE f.consumer = %1$s AND f.commit_lsn = u.lsn AND f.commit_idx = u.idx
                RETURNING f.commit_lsn, f.commit_idx, f.deliveries)
            SELECT concat('%1$s-', $3, '-', r.commit_lsn, '-', r.commit_idx), t.deliveries, $4,
                   r.commit_lsn, r.commit_idx, r.table_schema, r.table_name, r.action, r.message
              FROM taken t
              JOIN walbrook.pull_messages_%1$s r
                ON r.consumer = %1$s AND r.commit_lsn = t.commit_lsn AND r.commit_idx = t.commit_idx
             ORDER BY r.commit_lsn, r.commit_idx
            $query$, id) USING take_lsns, take_idxs, lease, until, holder;
    END IF;
    IF wait_lsns IS NOT NULL THEN
        EXECUTE format($query$
            UPDATE walbrook.pull_in_flight_%1$s f SET lease_until = NULL, due_at = $3
              FROM unnest($1, $2) u (lsn, idx)
             WHERE f.consumer = %1$s AND f.commit_lsn = u.lsn AND f.commit_idx = u.idx
            $query$, id) USING wait_lsns, wait_idxs, moment;
        PERFORM walbrook.hold_back(id, lease, moment);
    END IF;
END
$$;

-- What was not handed out yet, from where the last claim got to.
CREATE OR REPLACE FUNCTION walbrook.claim_fresh(settings walbrook.pull_settings, last walbrook.pull_claims, wanted integer,
                                                most integer, lease bigint, moment timestamptz,
                                                until timestamptz, holder text)
RETURNS SETOF walbrook.received
LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY EXECUTE format($query$
        WITH fresh AS MATERIALIZED (
            SELECT r.commit_lsn, r.commit_idx, r.group_id, r.whole_table, r.bytes, r.table_schema,
                   r.table_name, r.action, r.message
              FROM walbrook.pull_messages_%1$s r
             WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
             ORDER BY r.commit_lsn, r.commit_idx LIMIT $4),
        seen AS MATERIALIZED (
            SELECT f.*,
                   coalesce((SELECT true FROM walbrook.pull_in_flight_%1$s e
                              WHERE e.consumer = %1$s AND e.group_id = f.group_id
                                AND e.lease_id IS DISTINCT FROM $5 LIMIT 1),
                            (SELECT true FROM walbrook.pull_in_flight_%1$s e
                              WHERE e.consumer = %1$s AND e.whole_table
                                AND e.table_schema = f.table_schema AND e.table_name = f.table_name
                                AND e.lease_id IS DISTINCT FROM $5 LIMIT 1),
                            f.whole_table
                            AND (SELECT true FROM walbrook.pull_in_flight_%1$s e
                                  WHERE e.consumer = %1$s
                                    AND e.table_schema = f.table_schema AND e.table_name = f.table_name
                                    AND e.lease_id IS DISTINCT FROM $5 LIMIT 1),
                            false) AS is_behind
              FROM fresh f),
        judged AS (
            SELECT s.*, s.is_behind
                   OR coalesce(bool_or(s.is_behind AND s.whole_table)
                               OVER (PARTITION BY s.table_schema, s.table_name
                                     ORDER BY s.commit_lsn, s.commit_idx), false) AS waits
              FROM seen s),
        counted AS (
            SELECT j.*,
                   coalesce(count(*) FILTER (WHERE NOT j.waits) OVER before, 0) AS taken_before,
                   coalesce(sum(j.bytes) FILTER (WHERE NOT j.waits) OVER before, 0) AS bytes_before
              FROM judged j
            WINDOW before AS (ORDER BY j.commit_lsn, j.commit_idx
                              ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)),
        passed AS MATERIALIZED (
            SELECT * FROM counted c WHERE c.taken_before < $3 AND c.bytes_before < walbrook.receive_bytes_max()),
        put AS (
            INSERT INTO walbrook.pull_in_flight_%1$s
                   (consumer, commit_lsn, commit_idx, group_id, lease_id, lease_until, due_at,
                    deliveries, whole_table, table_schema, table_name, holder)
            SELECT %1$s, p.commit_lsn, p.commit_idx, p.group_id,
                   CASE WHEN NOT p.waits THEN $5 END, CASE WHEN NOT p.waits THEN $7 END,
                   CASE WHEN p.waits THEN $6 END, CASE WHEN p.waits THEN 0 ELSE 1 END,
                   p.whole_table, p.table_schema, p.table_name, CASE WHEN NOT p.waits THEN $8 END
              FROM passed p),
        noted AS (
            INSERT INTO walbrook.pull_claims AS c
                   (consumer, lease_id, commit_lsn, commit_idx, swept_to, swept_at, rows_most,
                    held_most, passed, looked_at)
            SELECT %1$s, $5, p.lsns[1], p.idxs[1], $9, $10, $11 + p.rows, $12 + p.rows - p.waiting,
                   p.waiting, p.rows
              FROM (SELECT array_agg(x.commit_lsn ORDER BY x.commit_lsn DESC, x.commit_idx DESC) AS lsns,
                           array_agg(x.commit_idx ORDER BY x.commit_lsn DESC, x.commit_idx DESC) AS idxs,
                           count(*) AS rows, count(*) FILTER (WHERE x.waits) AS waiting
                      FROM passed x) p
             WHERE p.rows > 0
                ON CONFLICT ON CONSTRAINT pull_claims_pkey DO UPDATE
               SET commit_lsn = excluded.commit_lsn, commit_idx = excluded.commit_idx,
                   rows_most = excluded.rows_most, held_most = excluded.held_most,
                   passed = c.passed + excluded.passed, looked_at = excluded.looked_at)
        SELECT concat('%1$s-', $5, '-', p.commit_lsn, '-', p.commit_idx), 1, $7, p.commit_lsn,
               p.commit_idx, p.table_schema, p.table_name, p.action, p.message
          FROM passed p WHERE NOT p.waits ORDER BY p.commit_lsn, p.commit_idx
        $query$, settings.consumer)
        USING last.commit_lsn, last.commit_idx, wanted, most, lease, moment, until, holder,
              last.swept_to, last.swept_at, last.rows_most, last.held_most;
END
$$;
