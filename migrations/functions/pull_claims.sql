-- Pull consumers: what is stored for them, who holds what, and the functions they fetch with.
--
-- A message is a row of walbrook.records from when it is stored until it is acknowledged; the row is
-- never rewritten. Claims go through them once, in cursor order: below where the last claim of a
-- consumer got to (walbrook.claims), a message that is not gone has a small row in
-- walbrook.in_flight. So a claim costs the same whatever waits behind it or was there before it.
--
-- What must always hold:
-- * Claims of one consumer come one after another (each locks its row of walbrook.pulls), so nobody
--   is handed what somebody else holds.
-- * A message goes out only if no earlier one of its group, or of its whole table where one of the
--   two has its place there, is held by somebody else or waits.
-- * Whoever acknowledges never waits for a lock of walbrook.pulls (it may wait for a claim that is at
--   what it has to wake), and a claim never waits for an acknowledgement: it passes over the rows that
--   others are at. Locks are taken in the order stored, pulls, in_flight by cursor, records.
-- * What one statement locks the next one changes, never the same: whoever had to wait for the lock
--   has the row's newest version, which that statement's snapshot does not see.
-- * One that waits for an earlier one (lease_until and due_at null) is looked at again when that one
--   goes: a claim holds a lock on it that lets an acknowledgement through only after the claim.

-- ------------------------------------------------------------------------------------------------
-- Claims.

-- Whether a claim would find anything, without a lock: what was stored lies ahead of the last claim,
-- or something in flight is due.
CREATE OR REPLACE FUNCTION walbrook.claimable(consumer integer) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    last walbrook.claims;
    due  timestamptz;
BEGIN
    SELECT c.* INTO last FROM walbrook.claims c
     WHERE c.consumer = claimable.consumer ORDER BY c.lease_id DESC LIMIT 1;
    IF EXISTS (SELECT FROM walbrook.stored s
                WHERE s.consumer = claimable.consumer
                  AND ((s.commit_lsn, s.commit_idx) > (last.commit_lsn, last.commit_idx)) IS NOT FALSE) THEN
        RETURN true;
    END IF;
    RETURN coalesce(walbrook.next_due(claimable.consumer) <= clock_timestamp(), false);
END
$$;

COMMENT ON FUNCTION walbrook.claimable IS 'Whether the next claim would find anything to look at.';

-- When something may have to be looked at again; null if nothing is in flight.
CREATE OR REPLACE FUNCTION walbrook.next_due(consumer integer) RETURNS timestamptz
LANGUAGE plpgsql AS $$
DECLARE
    found timestamptz;
BEGIN
    EXECUTE format($query$
        SELECT least((SELECT min(f.due_at) FROM walbrook.in_flight_%1$s f
                       WHERE f.consumer = %1$s AND f.due_at IS NOT NULL),
                     (SELECT min(f.lease_until) FROM walbrook.in_flight_%1$s f
                       WHERE f.consumer = %1$s AND f.lease_until IS NOT NULL))
        $query$, next_due.consumer) INTO found;
    RETURN found;
END
$$;

-- How many a claim could look at, at most as many as asked.
CREATE OR REPLACE FUNCTION walbrook.available(consumer integer, most bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    last  walbrook.claims;
    found bigint;
BEGIN
    SELECT c.* INTO last FROM walbrook.claims c
     WHERE c.consumer = available.consumer ORDER BY c.lease_id DESC LIMIT 1;
    EXECUTE format($query$
        SELECT (SELECT count(*) FROM (
                    SELECT FROM walbrook.records_%1$s r
                     WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
                     ORDER BY r.commit_lsn, r.commit_idx LIMIT $4) few)
             + (SELECT count(*) FROM (
                    SELECT FROM walbrook.in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.due_at <= $3 LIMIT $4) few)
             + (SELECT count(*) FROM (
                    SELECT FROM walbrook.in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.lease_until <= $3 LIMIT $4) few)
        $query$, available.consumer)
       INTO found
      USING coalesce(last.commit_lsn, '0/0'), coalesce(last.commit_idx, -1), clock_timestamp(), most;
    RETURN least(found, most);
END
$$;

-- Those that this claim found behind an earlier one (due_at is its moment) wait for it. One whose
-- earlier ones are all being acknowledged right now is looked at again soon instead: whoever does
-- that has not seen that it waits.
CREATE OR REPLACE FUNCTION walbrook.hold_back(consumer integer, lease bigint, moment timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    lsns  pg_lsn[];
    idxs  bigint[];
    found boolean[];
BEGIN
    -- In two steps: what a statement itself has changed it can no longer lock. Of each group, and of
    -- each table, the first that nobody is at is looked for once: who acknowledges may be at thousands.
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
              FROM walbrook.in_flight_%1$s w WHERE w.consumer = %1$s AND w.due_at = $2),
        looked AS MATERIALIZED (
            SELECT w.*, g.place AS in_group, t.place AS in_table, a.place AS in_whole
              FROM waiters w
              LEFT JOIN LATERAL (
                   SELECT ROW(e.commit_lsn, e.commit_idx) AS place FROM walbrook.in_flight_%1$s e
                    WHERE w.of_group AND e.consumer = %1$s AND e.group_id = w.group_id
                      AND e.lease_id IS DISTINCT FROM $1
                    ORDER BY e.commit_lsn, e.commit_idx LIMIT 1 FOR KEY SHARE SKIP LOCKED) g ON true
              LEFT JOIN LATERAL (
                   SELECT ROW(e.commit_lsn, e.commit_idx) AS place FROM walbrook.in_flight_%1$s e
                    WHERE w.of_table AND e.consumer = %1$s AND e.whole_table
                      AND e.table_schema = w.table_schema AND e.table_name = w.table_name
                      AND e.lease_id IS DISTINCT FROM $1
                    ORDER BY e.commit_lsn, e.commit_idx LIMIT 1 FOR KEY SHARE SKIP LOCKED) t ON true
              LEFT JOIN LATERAL (
                   SELECT ROW(e.commit_lsn, e.commit_idx) AS place FROM walbrook.in_flight_%1$s e
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
        UPDATE walbrook.in_flight_%1$s f
           SET due_at = CASE WHEN NOT u.found THEN $4 + interval '20 milliseconds' END
          FROM unnest($1, $2, $3) u (lsn, idx, found)
         WHERE f.consumer = %1$s AND f.commit_lsn = u.lsn AND f.commit_idx = u.idx
        $query$, hold_back.consumer) USING lsns, idxs, found, moment;
END
$$;

-- What came back or was not acknowledged in time, in cursor order, and with each what waits for it.
CREATE OR REPLACE FUNCTION walbrook.claim_again(settings walbrook.pulls, last walbrook.claims, batch_size integer,
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
              FROM (SELECT f.commit_lsn, f.commit_idx FROM walbrook.in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.due_at <= $2
                     UNION ALL
                    SELECT f.commit_lsn, f.commit_idx FROM walbrook.in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.lease_until > $1 AND f.lease_until <= $2
                     ORDER BY 1, 2) c,
                   LATERAL (SELECT f.commit_lsn, f.commit_idx, f.group_id, f.whole_table,
                                   f.table_schema, f.table_name, f.deliveries
                              FROM walbrook.in_flight_%1$s f
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
                              FROM walbrook.in_flight_%1$s f
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
                   LATERAL (SELECT f.commit_lsn, f.commit_idx FROM walbrook.in_flight_%1$s f
                             WHERE f.consumer = %1$s AND f.group_id = g.group_id
                               AND (f.commit_lsn, f.commit_idx)
                                   NOT IN (SELECT t.commit_lsn, t.commit_idx FROM together t)
                             ORDER BY f.commit_lsn, f.commit_idx LIMIT 1) e),
        seen AS (
            SELECT t.*, r.bytes,
                   coalesce((o.commit_lsn, o.commit_idx) < (t.commit_lsn, t.commit_idx), false)
                   OR EXISTS (SELECT FROM walbrook.in_flight_%1$s e
                               WHERE e.consumer = %1$s AND e.whole_table
                                 AND e.table_schema = t.table_schema AND e.table_name = t.table_name
                                 AND (e.commit_lsn, e.commit_idx) < (t.commit_lsn, t.commit_idx)
                                 AND (e.commit_lsn, e.commit_idx)
                                     NOT IN (SELECT x.commit_lsn, x.commit_idx FROM together x))
                   OR t.whole_table
                      AND EXISTS (SELECT FROM walbrook.in_flight_%1$s e
                                   WHERE e.consumer = %1$s
                                     AND e.table_schema = t.table_schema AND e.table_name = t.table_name
                                     AND (e.commit_lsn, e.commit_idx) < (t.commit_lsn, t.commit_idx)
                                     AND (e.commit_lsn, e.commit_idx)
                                         NOT IN (SELECT x.commit_lsn, x.commit_idx FROM together x))
                   AS is_behind
              FROM together t
              JOIN walbrook.records_%1$s r
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
        SELECT array_agg(commit_lsn) FILTER (WHERE fate = 'take' AND n <= $3 AND bytes_before < 67108864),
               array_agg(commit_idx) FILTER (WHERE fate = 'take' AND n <= $3 AND bytes_before < 67108864),
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
                UPDATE walbrook.in_flight_%1$s f
                   SET lease_id = $3, lease_until = $4, due_at = NULL, holder = $5,
                       deliveries = f.deliveries + 1
                  FROM unnest($1, $2) u (lsn, idx)
                 WHERE f.consumer = %1$s AND f.commit_lsn = u.lsn AND f.commit_idx = u.idx
                RETURNING f.commit_lsn, f.commit_idx, f.deliveries)
            SELECT concat('%1$s-', $3, '-', r.commit_lsn, '-', r.commit_idx), t.deliveries, $4,
                   r.commit_lsn, r.commit_idx, r.table_schema, r.table_name, r.action, r.message
              FROM taken t
              JOIN walbrook.records_%1$s r
                ON r.consumer = %1$s AND r.commit_lsn = t.commit_lsn AND r.commit_idx = t.commit_idx
             ORDER BY r.commit_lsn, r.commit_idx
            $query$, id) USING take_lsns, take_idxs, lease, until, holder;
    END IF;
    IF wait_lsns IS NOT NULL THEN
        EXECUTE format($query$
            UPDATE walbrook.in_flight_%1$s f SET lease_until = NULL, due_at = $3
              FROM unnest($1, $2) u (lsn, idx)
             WHERE f.consumer = %1$s AND f.commit_lsn = u.lsn AND f.commit_idx = u.idx
            $query$, id) USING wait_lsns, wait_idxs, moment;
        PERFORM walbrook.hold_back(id, lease, moment);
    END IF;
END
$$;

-- What nobody was handed yet, from where the last claim got to.
CREATE OR REPLACE FUNCTION walbrook.claim_fresh(settings walbrook.pulls, last walbrook.claims, wanted integer,
                                     most integer, lease bigint, moment timestamptz,
                                     until timestamptz, holder text)
RETURNS SETOF walbrook.received
LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY EXECUTE format($query$
        WITH fresh AS MATERIALIZED (
            SELECT r.commit_lsn, r.commit_idx, r.group_id, r.whole_table, r.bytes, r.table_schema,
                   r.table_name, r.action, r.message
              FROM walbrook.records_%1$s r
             WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
             ORDER BY r.commit_lsn, r.commit_idx LIMIT $4),
        seen AS MATERIALIZED (
            SELECT f.*,
                   coalesce((SELECT true FROM walbrook.in_flight_%1$s e
                              WHERE e.consumer = %1$s AND e.group_id = f.group_id
                                AND e.lease_id IS DISTINCT FROM $5 LIMIT 1),
                            (SELECT true FROM walbrook.in_flight_%1$s e
                              WHERE e.consumer = %1$s AND e.whole_table
                                AND e.table_schema = f.table_schema AND e.table_name = f.table_name
                                AND e.lease_id IS DISTINCT FROM $5 LIMIT 1),
                            f.whole_table
                            AND (SELECT true FROM walbrook.in_flight_%1$s e
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
            SELECT * FROM counted c WHERE c.taken_before < $3 AND c.bytes_before < 67108864),
        put AS (
            INSERT INTO walbrook.in_flight_%1$s
                   (consumer, commit_lsn, commit_idx, group_id, lease_id, lease_until, due_at,
                    deliveries, whole_table, table_schema, table_name, holder)
            SELECT %1$s, p.commit_lsn, p.commit_idx, p.group_id,
                   CASE WHEN NOT p.waits THEN $5 END, CASE WHEN NOT p.waits THEN $7 END,
                   CASE WHEN p.waits THEN $6 END, CASE WHEN p.waits THEN 0 ELSE 1 END,
                   p.whole_table, p.table_schema, p.table_name, CASE WHEN NOT p.waits THEN $8 END
              FROM passed p),
        noted AS (
            INSERT INTO walbrook.claims AS c
                   (consumer, lease_id, commit_lsn, commit_idx, swept_to, swept_at, rows_most,
                    held_most, passed, looked_at)
            SELECT %1$s, $5, p.lsns[1], p.idxs[1], $9, $10, $11 + p.rows, $12 + p.rows - p.waiting,
                   p.waiting, p.rows
              FROM (SELECT array_agg(x.commit_lsn ORDER BY x.commit_lsn DESC, x.commit_idx DESC) AS lsns,
                           array_agg(x.commit_idx ORDER BY x.commit_lsn DESC, x.commit_idx DESC) AS idxs,
                           count(*) AS rows, count(*) FILTER (WHERE x.waits) AS waiting
                      FROM passed x) p
             WHERE p.rows > 0
                ON CONFLICT ON CONSTRAINT claims_pkey DO UPDATE
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

-- So many wait for an earlier one of their group that claims look no further: others stand behind them.
CREATE OR REPLACE FUNCTION walbrook.say_held_up(settings walbrook.pulls, is_full boolean) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF is_full THEN
        INSERT INTO walbrook.health_events (source, consumer, kind, severity, what, fix)
        SELECT c.source, c.name, 'claims_held_up', 'warning',
               format('claims of %s look no further: more messages than its max_in_flight allows for are '
                      'handed out or wait for an earlier one of their group', c.name),
               'walbrook.leases says who holds what: let the holders acknowledge, or raise max_in_flight '
               'of its destination'
          FROM walbrook.consumers c WHERE c.id = settings.consumer
            ON CONFLICT (source, coalesce(consumer, ''), kind) WHERE resolved_at IS NULL
            DO UPDATE SET seen_at = clock_timestamp();
    ELSE
        UPDATE walbrook.health_events e SET resolved_at = clock_timestamp()
          FROM walbrook.consumers c
         WHERE c.id = settings.consumer AND e.source = c.source AND e.consumer = c.name
           AND e.kind = 'claims_held_up' AND e.resolved_at IS NULL;
    END IF;
END
$$;

-- One pass for one claimer: what came back first, then what nobody had yet. It goes through at most
-- twenty steps of messages that it must pass over, and comes back with less then.
CREATE OR REPLACE FUNCTION walbrook.claim(consumer integer, batch_size integer, visibility interval, holder text)
RETURNS SETOF walbrook.received
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    id       CONSTANT integer := claim.consumer;
    spare    CONSTANT integer := 5000;
    settings walbrook.pulls;
    last     walbrook.claims;
    noted    walbrook.claims;
    next     record;
    lease    bigint;
    moment   timestamptz;
    until    timestamptz;
    wanted   bigint;
    most     bigint;
    got      bigint;
    taken    bigint := 0;
    passed   integer := 0;
    is_swept boolean := false;
BEGIN
    SELECT p.* INTO settings FROM walbrook.pulls p WHERE p.consumer = id FOR NO KEY UPDATE;
    -- Whoever pauses it holds that lock.
    IF EXISTS (SELECT FROM walbrook.consumers c WHERE c.id = claim.consumer AND c.paused_at IS NOT NULL) THEN
        RETURN;
    END IF;
    lease := nextval('walbrook.lease_ids');
    SELECT c.* INTO last FROM walbrook.claims c
     WHERE c.consumer = id ORDER BY c.lease_id DESC LIMIT 1;
    IF NOT FOUND THEN
        last := ROW(id, 0, '0/0', -1, '-infinity', '-infinity', 0, 0, 0, 0);
    END IF;
    moment := clock_timestamp();
    until := moment + coalesce(visibility, make_interval(secs => settings.visibility_s));
    IF settings.ttl_s IS NOT NULL THEN
        PERFORM walbrook.drop_aged(settings, last);
    END IF;
    IF last.held_most + batch_size > settings.max_in_flight
       OR last.rows_most + batch_size > settings.max_in_flight + spare THEN
        EXECUTE format('SELECT count(*), count(*) FILTER (WHERE deliveries > 0) FROM walbrook.in_flight_%s', id)
           INTO last.rows_most, last.held_most;
    END IF;
    -- All of them every so often, and when the clock was set back.
    IF NOT moment BETWEEN last.swept_at AND last.swept_at + interval '10 seconds' THEN
        last.swept_to := '-infinity';
        last.swept_at := moment;
        is_swept := true;
        PERFORM walbrook.say_held_up(settings, last.rows_most + batch_size > settings.max_in_flight + spare);
        -- With them the first of what waits, should nobody have woken it.
        EXECUTE format($query$
            UPDATE walbrook.in_flight_%1$s f SET due_at = $1
              FROM (SELECT f.commit_lsn, f.commit_idx FROM walbrook.in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.lease_until IS NULL AND f.due_at IS NULL
                     ORDER BY f.commit_lsn, f.commit_idx LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED) w
             WHERE f.consumer = %1$s AND f.commit_lsn = w.commit_lsn AND f.commit_idx = w.commit_idx
            $query$, id) USING moment;
    END IF;
    wanted := least(batch_size, settings.max_in_flight - last.held_most);
    most := greatest(least(wanted, settings.max_in_flight + spare - last.rows_most), 0);
    FOR step IN 1..5 LOOP
        -- Most often nothing is due, and nothing of what comes next waits for anything.
        EXECUTE format($query$
            SELECT EXISTS (SELECT FROM walbrook.in_flight_%1$s f
                            WHERE f.consumer = %1$s AND f.due_at <= $6)
                   OR EXISTS (SELECT FROM walbrook.in_flight_%1$s f
                               WHERE f.consumer = %1$s AND f.lease_until > $5 AND f.lease_until <= $6)
                   AS is_due,
                   count(*) AS rows, max(n.commit_lsn) AS commit_lsn,
                   (array_agg(n.commit_idx ORDER BY n.commit_lsn DESC, n.commit_idx DESC))[1] AS commit_idx,
                   sum(n.bytes) < 67108864
                   AND bool_or(n.whole_table
                               OR (SELECT true FROM walbrook.in_flight_%1$s e
                                    WHERE e.consumer = %1$s AND e.group_id = n.group_id
                                      AND e.lease_id IS DISTINCT FROM $3 LIMIT 1)) IS NOT TRUE
                   AND NOT EXISTS (SELECT FROM walbrook.in_flight_%1$s e
                                    WHERE e.consumer = %1$s AND e.whole_table) AS are_free
              FROM (SELECT r.commit_lsn, r.commit_idx, r.group_id, r.whole_table, r.bytes
                      FROM walbrook.records_%1$s r
                     WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
                     ORDER BY r.commit_lsn, r.commit_idx LIMIT $4) n
            $query$, id) INTO next
            USING last.commit_lsn, last.commit_idx, lease, most, last.swept_to, moment;
        EXIT WHEN NOT next.is_due OR taken > 0;
        RETURN QUERY SELECT * FROM walbrook.claim_again(
            settings, last, (batch_size - taken)::integer, greatest(wanted - taken, 0)::integer,
            lease, moment, until, holder);
        GET DIAGNOSTICS got = ROW_COUNT;
        taken := taken + got;
        most := greatest(least(wanted - taken, most), 0);
    END LOOP;
    IF next.rows > most THEN
        next.are_free := false;  -- it was looked at before some of what came back was taken
    END IF;
    IF NOT next.is_due THEN
        last.swept_to := moment;
    END IF;
    last.held_most := last.held_most + taken;
    FOR step IN 1..20 LOOP
        EXIT WHEN taken >= wanted OR most < 1 OR next.rows = 0;
        IF step = 1 AND next.are_free THEN
            RETURN QUERY EXECUTE format($query$
                WITH fresh AS MATERIALIZED (
                    SELECT r.commit_lsn, r.commit_idx, r.group_id, r.table_schema, r.table_name,
                           r.action, r.message
                      FROM walbrook.records_%1$s r
                     WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
                       AND (r.commit_lsn, r.commit_idx) <= ($3, $4)
                     ORDER BY r.commit_lsn, r.commit_idx),
                put AS (
                    INSERT INTO walbrook.in_flight_%1$s
                           (consumer, commit_lsn, commit_idx, group_id, lease_id, lease_until,
                            deliveries, whole_table, table_schema, table_name, holder)
                    SELECT %1$s, f.commit_lsn, f.commit_idx, f.group_id, $5, $6, 1, false,
                           f.table_schema, f.table_name, $7
                      FROM fresh f)
                SELECT concat('%1$s-', $5, '-', f.commit_lsn, '-', f.commit_idx), 1, $6,
                       f.commit_lsn, f.commit_idx, f.table_schema, f.table_name, f.action, f.message
                  FROM fresh f
                $query$, id)
                USING last.commit_lsn, last.commit_idx, next.commit_lsn, next.commit_idx, lease,
                      until, holder;
            INSERT INTO walbrook.claims AS c
                   (consumer, lease_id, commit_lsn, commit_idx, swept_to, swept_at, rows_most,
                    held_most, looked_at)
            VALUES (id, lease, next.commit_lsn, next.commit_idx, last.swept_to, last.swept_at,
                    last.rows_most + next.rows, last.held_most + next.rows, next.rows)
            RETURNING c.* INTO noted;
            EXIT;
        END IF;
        IF step > 1 THEN
            most := least(greatest(wanted - taken, 500), settings.max_in_flight + spare - last.rows_most);
            EXIT WHEN most < 1;
        END IF;
        RETURN QUERY SELECT * FROM walbrook.claim_fresh(
            settings, last, (wanted - taken)::integer, most::integer, lease, moment, until, holder);
        GET DIAGNOSTICS got = ROW_COUNT;
        taken := taken + got;
        SELECT c.* INTO noted FROM walbrook.claims c WHERE c.consumer = id AND c.lease_id = lease;
        EXIT WHEN NOT FOUND OR (noted.commit_lsn, noted.commit_idx) = (last.commit_lsn, last.commit_idx);
        last := noted;
        IF last.passed > passed THEN
            PERFORM walbrook.hold_back(id, lease, moment);
            passed := last.passed;
        END IF;
        EXIT WHEN last.looked_at < most;
    END LOOP;
    IF noted.lease_id IS NULL AND (taken > 0 OR is_swept) THEN
        INSERT INTO walbrook.claims (consumer, lease_id, commit_lsn, commit_idx, swept_to, swept_at,
                                     rows_most, held_most)
        VALUES (id, lease, last.commit_lsn, last.commit_idx, last.swept_to, last.swept_at,
                last.rows_most, last.held_most);
    END IF;
    IF noted.lease_id IS NOT NULL OR taken > 0 OR is_swept THEN
        DELETE FROM walbrook.claims c WHERE c.consumer = id AND c.lease_id < lease;
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.claim IS 'What walbrook.receive does once its arguments are checked.';
