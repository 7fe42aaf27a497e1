-- Pull consumers: messages that are dropped, by age or by a bound, and the gap that says so.

-- ------------------------------------------------------------------------------------------------
-- Dropping on purpose: never in silence. Of each run of messages that goes, the last one's place is
-- taken by a gap, which the consumer gets like any message and walbrook.gaps lists.
CREATE OR REPLACE FUNCTION walbrook.gap_message(template text, lsn pg_lsn, idx bigint, first text, past text, reason text)
RETURNS json
LANGUAGE sql STABLE AS $$
    SELECT replace(replace(replace(replace(replace(replace(replace(replace(template,
           '7777777777777777777', (lsn - '0/0')::text),
           '666666666666', idx::text),
           '2001-02-03T04:05:06.789012Z',
           to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')),
           '981173106789012', floor(extract(epoch FROM now()) * 1000000)::bigint::text),
           '981173106789', floor(extract(epoch FROM now()) * 1000)::bigint::text),
           'walbrook:from', first), 'walbrook:to', past), 'walbrook:reason', reason)::json
$$;

-- Drops from the oldest that no worker holds: so many, or so many bytes, or all that were stored before.
-- The caller holds the lock of walbrook.pull_settings; one call looks at no more than 20000 of either kind.
CREATE OR REPLACE FUNCTION walbrook.drop_records(settings walbrook.pull_settings, last walbrook.pull_claims, messages bigint,
                                                 bytes bigint, before timestamptz, reason text,
                                                 OUT dropped bigint, OUT dropped_bytes bigint)
LANGUAGE plpgsql
-- Not as a claim has them, which may call it: many meet many here.
SET enable_seqscan = on SET enable_bitmapscan = on SET enable_hashjoin = on SET enable_mergejoin = on
AS $$
DECLARE
    id      integer := settings.consumer;
    groups  bigint[];
    schemas text[];
    names   text[];
    wholes  boolean[];
    what    text;
BEGIN
    EXECUTE format($query$
        WITH idle AS MATERIALIZED (
            SELECT f.commit_lsn, f.commit_idx FROM walbrook.pull_in_flight_%1$s f
             WHERE f.consumer = %1$s AND f.lease_until IS NULL
             ORDER BY f.commit_lsn, f.commit_idx LIMIT 20000 FOR UPDATE SKIP LOCKED),
        runs AS (
            SELECT f.commit_lsn, f.commit_idx, i.commit_lsn IS NOT NULL AS is_idle,
                   count(*) FILTER (WHERE i.commit_lsn IS NULL) OVER (ORDER BY f.commit_lsn, f.commit_idx) AS run
              FROM walbrook.pull_in_flight_%1$s f
              LEFT JOIN idle i ON i.commit_lsn = f.commit_lsn AND i.commit_idx = f.commit_idx
             WHERE f.consumer = %1$s),
        unheld AS (
            SELECT r.commit_lsn, r.commit_idx, r.bytes, r.stored_at, r.action, u.run
              FROM runs u
              JOIN walbrook.pull_messages_%1$s r
                ON r.consumer = %1$s AND r.commit_lsn = u.commit_lsn AND r.commit_idx = u.commit_idx
             WHERE u.is_idle
             UNION ALL
            (SELECT r.commit_lsn, r.commit_idx, r.bytes, r.stored_at, r.action, -1
               FROM walbrook.pull_messages_%1$s r
              WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
              ORDER BY r.commit_lsn, r.commit_idx LIMIT 20000)),
        counted AS (
            SELECT u.*, count(*) FILTER (WHERE u.action <> 'gap') OVER place AS n,
                   sum(u.bytes) OVER place - u.bytes AS bytes_before
              FROM unheld u WINDOW place AS (ORDER BY u.commit_lsn, u.commit_idx)),
        doomed AS MATERIALIZED (
            SELECT c.*,
                   row_number() OVER (PARTITION BY c.run ORDER BY c.commit_lsn, c.commit_idx) AS nth,
                   row_number() OVER (PARTITION BY c.run ORDER BY c.commit_lsn DESC, c.commit_idx DESC) AS nth_last,
                   bool_or(c.action <> 'gap') OVER (PARTITION BY c.run) AS has_changes
              FROM counted c
             WHERE c.n <= $3 OR c.bytes_before < $4 OR c.stored_at < $5),
        gaps AS MATERIALIZED (
            SELECT coalesce(g.from_lsn, a.commit_lsn) AS from_lsn, coalesce(g.from_idx, a.commit_idx) AS from_idx,
                   z.commit_lsn, z.commit_idx, c.source, c.name
              FROM doomed a
              JOIN doomed z ON z.run = a.run AND z.nth_last = 1
              JOIN walbrook.consumers c ON c.id = %1$s
              LEFT JOIN walbrook.gaps g
                ON a.action = 'gap' AND g.source = c.source AND g.consumer = c.name
               AND g.to_lsn = a.commit_lsn AND g.to_idx = a.commit_idx + 1
             WHERE a.nth = 1 AND a.has_changes),
        noted AS (
            INSERT INTO walbrook.gaps AS g
                   (source, consumer, from_lsn, from_idx, to_lsn, to_idx, reason, reported_at)
            SELECT source, name, from_lsn, from_idx, commit_lsn, commit_idx + 1, $6, clock_timestamp()
              FROM gaps
                ON CONFLICT ON CONSTRAINT gaps_source_consumer_from_lsn_from_idx_key
                DO UPDATE SET to_lsn = excluded.to_lsn, to_idx = excluded.to_idx,
                              reason = excluded.reason, noted_at = excluded.noted_at,
                              reported_at = excluded.reported_at),
        erased AS (
            DELETE FROM walbrook.pull_messages_%1$s r USING doomed d
             WHERE r.consumer = %1$s AND r.commit_lsn = d.commit_lsn AND r.commit_idx = d.commit_idx
               AND d.has_changes AND d.nth_last > 1),
        reported AS (
            UPDATE walbrook.pull_messages_%1$s r
               SET action = 'gap', group_id = NULL, whole_table = false, table_schema = '',
                   table_name = '', commit_timestamp = clock_timestamp(), stored_at = clock_timestamp(),
                   bytes = length($7),
                   message = walbrook.gap_message(
                       $7, g.commit_lsn, g.commit_idx, g.from_lsn || ':' || g.from_idx,
                       g.commit_lsn || ':' || g.commit_idx + 1, $6)
              FROM gaps g
             WHERE r.consumer = %1$s AND r.commit_lsn = g.commit_lsn AND r.commit_idx = g.commit_idx),
        let_go AS (
            DELETE FROM walbrook.pull_in_flight_%1$s f USING doomed d
             WHERE f.consumer = %1$s AND f.commit_lsn = d.commit_lsn AND f.commit_idx = d.commit_idx
               AND d.has_changes AND d.nth_last > 1
            RETURNING f.group_id, f.table_schema, f.table_name, f.whole_table),
        kept AS (
            UPDATE walbrook.pull_in_flight_%1$s f
               SET group_id = NULL, whole_table = false, lease_id = NULL, deliveries = 0, error = NULL,
                   due_at = clock_timestamp()
              FROM doomed d
             WHERE f.consumer = %1$s AND f.commit_lsn = d.commit_lsn AND f.commit_idx = d.commit_idx
               AND d.has_changes AND d.nth_last = 1
            RETURNING f.commit_lsn, f.commit_idx),
        freed AS (
            SELECT group_id, table_schema, table_name, whole_table FROM let_go
             UNION ALL
            SELECT f.group_id, f.table_schema, f.table_name, f.whole_table
              FROM kept k
              JOIN walbrook.pull_in_flight_%1$s f
                ON f.consumer = %1$s AND f.commit_lsn = k.commit_lsn AND f.commit_idx = k.commit_idx)
        SELECT (SELECT count(*) - count(*) FILTER (WHERE nth_last = 1) FROM doomed WHERE has_changes),
               (SELECT coalesce(sum(d.bytes), 0) FROM doomed d WHERE d.has_changes),
               array_agg(group_id), array_agg(table_schema), array_agg(table_name), array_agg(whole_table)
          FROM freed
        $query$, id)
       INTO dropped, dropped_bytes, groups, schemas, names, wholes
      USING last.commit_lsn, last.commit_idx, messages, bytes, before, reason, settings.gap_message;
    IF dropped_bytes = 0 THEN
        RETURN;
    END IF;
    IF groups IS NOT NULL THEN
        PERFORM walbrook.wake_waiting(id, groups, schemas, names, wholes, in_claim => true);
    END IF;
    what := CASE reason WHEN 'ttl' THEN format('messages that were stored for more than %s s', settings.ttl_s)
                        ELSE 'the oldest messages, because its queue is as full as it may be' END;
    INSERT INTO walbrook.health_events (source, consumer, kind, severity, what, fix)
    SELECT c.source, c.name, 'records_dropped', 'warning',
           format('messages of %s are being dropped: %s', c.name, what),
           'let it fetch and acknowledge faster, or raise max_messages, max_bytes or ttl_s of its '
           'destination; walbrook.gaps lists what is gone'
      FROM walbrook.consumers c WHERE c.id = settings.consumer
        ON CONFLICT (source, coalesce(consumer, ''), kind) WHERE resolved_at IS NULL
        DO UPDATE SET what = excluded.what, seen_at = clock_timestamp();
END
$$;

-- A minute after the last one, nothing is being dropped any more.
CREATE OR REPLACE FUNCTION walbrook.nothing_dropped(id integer) RETURNS void
LANGUAGE sql AS $$
    UPDATE walbrook.health_events e SET resolved_at = clock_timestamp()
      FROM walbrook.consumers c
     WHERE c.id = nothing_dropped.id AND e.source = c.source AND e.consumer = c.name
       AND e.kind = 'records_dropped' AND e.resolved_at IS NULL
       AND e.seen_at < clock_timestamp() - interval '1 minute'
$$;

-- The same for what is older than ttl_s; what a worker holds is left to it.
CREATE OR REPLACE FUNCTION walbrook.drop_aged(settings walbrook.pull_settings, last walbrook.pull_claims) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    before timestamptz := clock_timestamp() - make_interval(secs => settings.ttl_s);
    is_aged boolean;
BEGIN
    EXECUTE format($query$
        SELECT coalesce((SELECT r.stored_at < $3 AND r.action <> 'gap' FROM walbrook.pull_messages_%1$s r
                          WHERE r.consumer = %1$s AND (r.commit_lsn, r.commit_idx) > ($1, $2)
                          ORDER BY r.commit_lsn, r.commit_idx LIMIT 1), false)
            OR EXISTS (SELECT FROM walbrook.pull_in_flight_%1$s f
                         JOIN walbrook.pull_messages_%1$s r USING (consumer, commit_lsn, commit_idx)
                        WHERE f.consumer = %1$s AND f.lease_until IS NULL
                          AND r.stored_at < $3 AND r.action <> 'gap')
        $query$, settings.consumer) INTO is_aged USING last.commit_lsn, last.commit_idx, before;
    IF is_aged THEN
        PERFORM walbrook.drop_records(settings, last, 0, 0, before, 'ttl');
    ELSE
        PERFORM walbrook.nothing_dropped(settings.consumer);
    END IF;
END
$$;

-- After so many were stored: keep the queue within its bounds. In the transaction that stored them.
CREATE OR REPLACE FUNCTION walbrook.keep_bounds(id integer, messages bigint, bytes bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    settings walbrook.pull_settings;
    last     walbrook.pull_claims;
    most     record;
    gone     record;
BEGIN
    SELECT p.* INTO settings FROM walbrook.pull_settings p WHERE p.consumer = keep_bounds.id;
    UPDATE walbrook.pull_positions s
       SET messages_most = s.messages_most + keep_bounds.messages,
           bytes_most = s.bytes_most + keep_bounds.bytes
     WHERE s.consumer = keep_bounds.id RETURNING s.messages_most, s.bytes_most INTO most;
    IF NOT (settings.ttl_s IS NOT NULL OR most.messages_most > settings.max_messages
            OR most.bytes_most > settings.max_bytes) IS TRUE THEN
        IF settings.max_messages IS NOT NULL OR settings.max_bytes IS NOT NULL THEN
            PERFORM walbrook.nothing_dropped(id);
        END IF;
        RETURN;
    END IF;
    PERFORM FROM walbrook.pull_settings p WHERE p.consumer = keep_bounds.id FOR NO KEY UPDATE;
    SELECT c.* INTO last FROM walbrook.pull_claims c
     WHERE c.consumer = keep_bounds.id ORDER BY c.lease_id DESC LIMIT 1;
    IF NOT FOUND THEN
        last := ROW(id, 0, '0/0', -1, '-infinity', '-infinity', 0, 0, 0, 0);
    END IF;
    IF settings.ttl_s IS NOT NULL THEN
        PERFORM walbrook.drop_aged(settings, last);
    END IF;
    FOR step IN 1..20 LOOP
        EXECUTE format('SELECT count(*) AS messages_most, coalesce(sum(r.bytes), 0) AS bytes_most '
                       'FROM walbrook.pull_messages_%s r', id) INTO most;
        EXIT WHEN NOT (most.messages_most > settings.max_messages
                       OR most.bytes_most > settings.max_bytes) IS TRUE;
        -- A little more than must be, so that the next few need no counting; and room for the gap.
        SELECT d.* INTO gone FROM walbrook.drop_records(settings, last,
            CASE WHEN most.messages_most > settings.max_messages
                 THEN most.messages_most - settings.max_messages + settings.max_messages / 20 + 1 ELSE 0 END,
            CASE WHEN most.bytes_most > settings.max_bytes
                 THEN most.bytes_most - settings.max_bytes + settings.max_bytes / 20
                      + length(settings.gap_message) ELSE 0 END,
            '-infinity', 'cap') d;
        EXIT WHEN gone.dropped = 0;
    END LOOP;
    UPDATE walbrook.pull_positions s SET messages_most = most.messages_most, bytes_most = most.bytes_most
     WHERE s.consumer = keep_bounds.id;
END
$$;
