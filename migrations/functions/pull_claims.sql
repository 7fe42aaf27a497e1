-- Pull consumers: what is stored for them, who holds what, and the functions they fetch with.
--
-- A message is a row of walbrook.pull_messages from when it is stored until it is acknowledged; the row is
-- never rewritten. Claims go through them once, in cursor order: below where the last claim of a
-- consumer got to (walbrook.pull_claims), a message that is not gone has a small row in
-- walbrook.pull_in_flight. So a claim costs the same whatever waits behind it or was there before it.
--
-- Invariant:
-- * Claims of one consumer come one after another (each locks its row of walbrook.pull_settings), so no claimer
--   is handed what another holds.
-- * A message goes out only if no earlier one of its group, or of its whole table where one of the
--   two has its place there, is held by another or waits.
-- * An acknowledgement never waits for a lock of walbrook.pull_settings (it may wait for a claim that is at
--   what it has to wake), and a claim never waits for an acknowledgement: it passes over the rows that
--   others are at. Locks are taken in the order pull_positions, pull_settings, pull_in_flight by
--   cursor, pull_messages.
-- * What one statement locks the next one changes, never the same: a statement that had to wait for the lock
--   has the row's newest version, which that statement's snapshot does not see.
-- * One that waits for an earlier one (lease_until and due_at null) is looked at again when that one
--   goes: a claim holds a lock on it that lets an acknowledgement through only after the claim.

-- Whether a claim would find anything, without a lock: what was stored lies ahead of the last claim,
-- or something in flight is due.
CREATE OR REPLACE FUNCTION walbrook.claimable(consumer integer) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    last walbrook.pull_claims;
    due  timestamptz;
BEGIN
    SELECT c.* INTO last FROM walbrook.pull_claims c
     WHERE c.consumer = claimable.consumer ORDER BY c.lease_id DESC LIMIT 1;
    IF EXISTS (SELECT FROM walbrook.pull_positions s
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
        SELECT least((SELECT min(f.due_at) FROM walbrook.pull_in_flight_%1$s f
                       WHERE f.consumer = %1$s AND f.due_at IS NOT NULL),
                     (SELECT min(f.lease_until) FROM walbrook.pull_in_flight_%1$s f
                       WHERE f.consumer = %1$s AND f.lease_until IS NOT NULL))
        $query$, next_due.consumer) INTO found;
    RETURN found;
END
$$;

-- How many a claim could look at, at most as many as asked.
CREATE OR REPLACE FUNCTION walbrook.available(consumer integer, most bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    last  walbrook.pull_claims;
    found bigint;
BEGIN
    SELECT c.* INTO last FROM walbrook.pull_claims c
     WHERE c.consumer = available.consumer ORDER BY c.lease_id DESC LIMIT 1;
    EXECUTE format($query$
        SELECT (SELECT count(*) FROM (
                    SELECT FROM walbrook.pull_messages_%1$s r
                     WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
                     ORDER BY r.commit_lsn, r.commit_idx LIMIT $4) few)
             + (SELECT count(*) FROM (
                    SELECT FROM walbrook.pull_in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.due_at <= $3 LIMIT $4) few)
             + (SELECT count(*) FROM (
                    SELECT FROM walbrook.pull_in_flight_%1$s f
                     WHERE f.consumer = %1$s AND f.lease_until <= $3 LIMIT $4) few)
        $query$, available.consumer)
       INTO found
      USING coalesce(last.commit_lsn, '0/0'), coalesce(last.commit_idx, -1), clock_timestamp(), most;
    RETURN least(found, most);
END
$$;

-- So many wait for an earlier one of their group that claims look no further: others stand behind them.
CREATE OR REPLACE FUNCTION walbrook.say_held_up(settings walbrook.pull_settings, is_full boolean) RETURNS void
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

-- One pass for one claimer: what came back first, then what was not handed out yet. It goes through at most
-- twenty steps of messages that it must pass over, and comes back with less then.
CREATE OR REPLACE FUNCTION walbrook.claim(consumer integer, batch_size integer, visibility interval, holder text)
RETURNS SETOF walbrook.received
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    id       CONSTANT integer := claim.consumer;
    spare    CONSTANT integer := walbrook.passed_over_max();
    settings walbrook.pull_settings;
    last     walbrook.pull_claims;
    noted    walbrook.pull_claims;
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
    SELECT p.* INTO settings FROM walbrook.pull_settings p WHERE p.consumer = id FOR NO KEY UPDATE;
    -- A pause holds that lock.
    IF EXISTS (SELECT FROM walbrook.consumers c WHERE c.id = claim.consumer AND c.paused_at IS NOT NULL) THEN
        RETURN;
    END IF;
    lease := nextval('walbrook.lease_ids');
    SELECT c.* INTO last FROM walbrook.pull_claims c
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
        EXECUTE format('SELECT count(*), count(*) FILTER (WHERE deliveries > 0) FROM walbrook.pull_in_flight_%s', id)
           INTO last.rows_most, last.held_most;
    END IF;
    -- All of them every so often, and when the clock was set back.
    IF NOT moment BETWEEN last.swept_at AND last.swept_at + interval '10 seconds' THEN
        last.swept_to := '-infinity';
        last.swept_at := moment;
        is_swept := true;
        PERFORM walbrook.say_held_up(settings, last.rows_most + batch_size > settings.max_in_flight + spare);
        -- With them the first of what waits, should nothing have woken it.
        EXECUTE format($query$
            UPDATE walbrook.pull_in_flight_%1$s f SET due_at = $1
              FROM (SELECT f.commit_lsn, f.commit_idx FROM walbrook.pull_in_flight_%1$s f
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
            SELECT EXISTS (SELECT FROM walbrook.pull_in_flight_%1$s f
                            WHERE f.consumer = %1$s AND f.due_at <= $6)
                   OR EXISTS (SELECT FROM walbrook.pull_in_flight_%1$s f
                               WHERE f.consumer = %1$s AND f.lease_until > $5 AND f.lease_until <= $6)
                   AS is_due,
                   count(*) AS rows, max(n.commit_lsn) AS commit_lsn,
                   (array_agg(n.commit_idx ORDER BY n.commit_lsn DESC, n.commit_idx DESC))[1] AS commit_idx,
                   sum(n.bytes) < walbrook.receive_bytes_max()
                   AND bool_or(n.whole_table
                               OR (SELECT true FROM walbrook.pull_in_flight_%1$s e
                                    WHERE e.consumer = %1$s AND e.group_id = n.group_id
                                      AND e.lease_id IS DISTINCT FROM $3 LIMIT 1)) IS NOT TRUE
                   AND NOT EXISTS (SELECT FROM walbrook.pull_in_flight_%1$s e
                                    WHERE e.consumer = %1$s AND e.whole_table) AS are_free
              FROM (SELECT r.commit_lsn, r.commit_idx, r.group_id, r.whole_table, r.bytes
                      FROM walbrook.pull_messages_%1$s r
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
                      FROM walbrook.pull_messages_%1$s r
                     WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
                       AND (r.commit_lsn, r.commit_idx) <= ($3, $4)
                     ORDER BY r.commit_lsn, r.commit_idx),
                put AS (
                    INSERT INTO walbrook.pull_in_flight_%1$s
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
            INSERT INTO walbrook.pull_claims AS c
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
        SELECT c.* INTO noted FROM walbrook.pull_claims c WHERE c.consumer = id AND c.lease_id = lease;
        EXIT WHEN NOT FOUND OR (noted.commit_lsn, noted.commit_idx) = (last.commit_lsn, last.commit_idx);
        last := noted;
        IF last.passed > passed THEN
            PERFORM walbrook.hold_back(id, lease, moment);
            passed := last.passed;
        END IF;
        EXIT WHEN last.looked_at < most;
    END LOOP;
    IF noted.lease_id IS NULL AND (taken > 0 OR is_swept) THEN
        INSERT INTO walbrook.pull_claims (consumer, lease_id, commit_lsn, commit_idx, swept_to, swept_at,
                                     rows_most, held_most)
        VALUES (id, lease, last.commit_lsn, last.commit_idx, last.swept_to, last.swept_at,
                last.rows_most, last.held_most);
    END IF;
    IF noted.lease_id IS NOT NULL OR taken > 0 OR is_swept THEN
        DELETE FROM walbrook.pull_claims c WHERE c.consumer = id AND c.lease_id < lease;
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.claim IS 'What walbrook.receive does once its arguments are checked.';
