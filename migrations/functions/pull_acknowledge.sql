-- Pull consumers: what claimers say of what they were handed.

-- An earlier one of these is gone: the first that waits behind it is looked at by the next claim.
CREATE OR REPLACE FUNCTION walbrook.wake_waiting(consumer integer, group_ids bigint[], table_schemas text[],
                                                 table_names text[], whole_tables boolean[], in_claim boolean)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    waiting boolean;
    locked  tid[];
BEGIN
    EXECUTE format('SELECT EXISTS (SELECT FROM walbrook.pull_in_flight_%1$s f WHERE f.consumer = %1$s '
                   'AND f.lease_until IS NULL AND f.due_at IS NULL)', wake_waiting.consumer) INTO waiting;
    IF NOT waiting THEN
        RETURN false;
    END IF;
    -- A claim that has one locked now has not seen what is gone: it is waited for. Locked in cursor
    -- order, so that two who do this do not lock each other out. A claim itself (the transaction that has the lock
    -- of walbrook.pull_settings) waits for none of them: the transaction that has one locked wakes it.
    EXECUTE format($query$
        WITH chosen AS MATERIALIZED (
            SELECT w.commit_lsn, w.commit_idx
              FROM (SELECT DISTINCT g FROM unnest($1) g WHERE g IS NOT NULL) gone,
                   LATERAL (SELECT f.commit_lsn, f.commit_idx FROM walbrook.pull_in_flight_%1$s f
                             WHERE f.consumer = %1$s AND f.group_id = gone.g
                               AND f.lease_until IS NULL AND f.due_at IS NULL
                             ORDER BY f.commit_lsn, f.commit_idx LIMIT 1) w
             UNION
            -- Where one has its place among all of its table, all that waits there is looked at.
            SELECT f.commit_lsn, f.commit_idx
              FROM (SELECT s, n FROM unnest($2, $3, $4) gone (s, n, whole) GROUP BY s, n
                    HAVING bool_or(whole)
                        OR EXISTS (SELECT FROM walbrook.pull_in_flight_%1$s w
                                    WHERE w.consumer = %1$s AND w.whole_table
                                      AND w.table_schema = s AND w.table_name = n)) t
              JOIN walbrook.pull_in_flight_%1$s f ON f.table_schema = t.s AND f.table_name = t.n
             WHERE f.consumer = %1$s AND f.lease_until IS NULL AND f.due_at IS NULL),
        locked AS MATERIALIZED (
            SELECT f.ctid
              FROM (SELECT * FROM chosen ORDER BY 1, 2) c,
                   LATERAL (SELECT f.ctid FROM walbrook.pull_in_flight_%1$s f
                             WHERE f.consumer = %1$s AND f.commit_lsn = c.commit_lsn
                               AND f.commit_idx = c.commit_idx
                               AND f.lease_until IS NULL AND f.due_at IS NULL
                             LIMIT 1 FOR NO KEY UPDATE %2$s) f)
        SELECT array_agg(l.ctid) FROM locked l
        $query$, wake_waiting.consumer, CASE WHEN in_claim THEN 'SKIP LOCKED' END)
       INTO locked USING group_ids, table_schemas, table_names, whole_tables;
    EXECUTE format('UPDATE walbrook.pull_in_flight_%s f SET due_at = clock_timestamp() WHERE f.ctid = ANY ($1)',
                   wake_waiting.consumer) USING locked;
    RETURN true;
END
$$;

-- Why those that were not done were not: stale, or another consumer''s.
CREATE OR REPLACE FUNCTION walbrook.refusals(consumer integer, ack_ids text[], gone_is_fine boolean,
                                             must_be_held boolean,
                                             OUT refused text[], OUT reasons text[])
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format($query$
        SELECT array_agg(w.ack_id), array_agg(w.why)
          FROM (SELECT g.ack_id,
                       CASE WHEN g.consumer <> %1$s THEN 'it is a lease of another consumer'
                            WHEN f.commit_lsn IS NULL THEN 'it is done: it was acknowledged or given up'
                            ELSE 'its lease is stale: it ran out or was given back, and the message goes to another'
                       END AS why
                  FROM walbrook.read_ack_ids($1) g
                  LEFT JOIN walbrook.pull_in_flight_%1$s f
                    ON f.consumer = %1$s AND g.consumer = %1$s
                   AND f.commit_lsn = g.commit_lsn AND f.commit_idx = g.commit_idx
                 WHERE g.consumer <> %1$s
                    OR (f.lease_id IS DISTINCT FROM g.lease_id OR $3 AND f.lease_until IS NULL)
                       AND NOT ($2 AND f.commit_lsn IS NULL)) w
        $query$, refusals.consumer) INTO refused, reasons USING ack_ids, gone_is_fine, must_be_held;
    refused := coalesce(refused, '{}');
    reasons := coalesce(reasons, '{}');
END
$$;

CREATE OR REPLACE FUNCTION walbrook.ack(consumer text, ack_ids text[],
                                        OUT done integer, OUT refused text[], OUT reasons text[])
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    id      integer := (walbrook.pull_consumer(ack.consumer)).consumer;
    mine    tid[];
    lsns    pg_lsn[];
    idxs    bigint[];
    groups  bigint[];
    schemas text[];
    names   text[];
    wholes  boolean[];
BEGIN
    -- Locked in cursor order, so that two who say the same do not lock each other out.
    EXECUTE format($query$
        SELECT count(*), array_agg(f.ctid), array_agg(f.commit_lsn), array_agg(f.commit_idx),
               array_agg(f.group_id), array_agg(f.table_schema), array_agg(f.table_name),
               array_agg(f.whole_table)
          FROM walbrook.read_ack_ids($1) g,
               LATERAL (SELECT f.ctid, f.commit_lsn, f.commit_idx, f.group_id, f.table_schema,
                               f.table_name, f.whole_table
                          FROM walbrook.pull_in_flight_%1$s f
                         WHERE f.consumer = %1$s AND f.commit_lsn = g.commit_lsn
                           AND f.commit_idx = g.commit_idx AND f.lease_id = g.lease_id
                         LIMIT 1 FOR UPDATE) f
         WHERE g.consumer = %1$s
        $query$, id) INTO done, mine, lsns, idxs, groups, schemas, names, wholes USING ack_ids;
    IF done > 0 THEN
        EXECUTE format($query$
            WITH gone AS (
                DELETE FROM walbrook.pull_in_flight_%1$s f WHERE f.ctid = ANY ($1))
            DELETE FROM walbrook.pull_messages_%1$s r USING unnest($2, $3) m (commit_lsn, commit_idx)
             WHERE r.consumer = %1$s AND r.commit_lsn = m.commit_lsn AND r.commit_idx = m.commit_idx
            $query$, id) USING mine, lsns, idxs;
    END IF;
    refused := '{}';
    reasons := '{}';
    IF done < cardinality(ack_ids) THEN
        SELECT r.refused, r.reasons INTO refused, reasons FROM walbrook.refusals(id, ack_ids, true, false) r;
    END IF;
    IF done > 0 AND walbrook.wake_waiting(id, groups, schemas, names, wholes, in_claim => false) THEN
        PERFORM pg_notify('walbrook_pull', id::text);
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.ack IS 'Say that messages are done; they are gone then. Saying it again is fine. refused: those whose lease is no longer the caller''s, and reasons why.';

CREATE OR REPLACE FUNCTION walbrook.nack(consumer text, ack_ids text[], delay interval DEFAULT NULL,
                                         error text DEFAULT NULL,
                                         OUT done integer, OUT refused text[], OUT reasons text[])
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    settings  walbrook.pull_settings := walbrook.pull_consumer(nack.consumer);
    id        integer := settings.consumer;
    mine      tid[];
    dead_lsns pg_lsn[];
    dead_idxs bigint[];
BEGIN
    PERFORM walbrook.check_interval('delay', delay, 0, 43200);
    EXECUTE format($query$
        SELECT array_agg(f.ctid)
          FROM walbrook.read_ack_ids($1) g,
               LATERAL (SELECT f.ctid
                          FROM walbrook.pull_in_flight_%1$s f
                         WHERE f.consumer = %1$s AND f.commit_lsn = g.commit_lsn
                           AND f.commit_idx = g.commit_idx AND f.lease_id = g.lease_id
                         LIMIT 1 FOR NO KEY UPDATE) f
         WHERE g.consumer = %1$s
        $query$, id) INTO mine USING ack_ids;
    EXECUTE format($query$
        WITH given_back AS (
            UPDATE walbrook.pull_in_flight_%1$s f
               SET lease_id = NULL, lease_until = NULL, error = $3,
                   due_at = clock_timestamp() + coalesce($2, make_interval(secs =>
                       least($4 * 2.0 ^ least(f.deliveries - 1, 40), $5) / 1000 * (1 + random() / 10)))
             WHERE f.ctid = ANY ($1)
            RETURNING f.commit_lsn, f.commit_idx, f.deliveries)
        SELECT count(*), array_agg(commit_lsn) FILTER (WHERE deliveries >= $6),
               array_agg(commit_idx) FILTER (WHERE deliveries >= $6)
          FROM given_back
        $query$, id) INTO done, dead_lsns, dead_idxs
      USING mine, delay, left(error, 2000), settings.retry_first_ms, settings.retry_max_ms,
            settings.max_deliveries;
    IF dead_lsns IS NOT NULL THEN
        PERFORM walbrook.bury_records(id, dead_lsns, dead_idxs, in_claim => false);
    END IF;
    refused := '{}';
    reasons := '{}';
    IF done < cardinality(ack_ids) THEN
        SELECT r.refused, r.reasons INTO refused, reasons FROM walbrook.refusals(id, ack_ids, false, false) r;
    END IF;
    IF done > 0 THEN
        PERFORM pg_notify('walbrook_pull', id::text);
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.nack IS 'Give messages back, to be handed out again after delay; without one the pause doubles each time. After max_deliveries they become dead letters.';

CREATE OR REPLACE FUNCTION walbrook.extend(consumer text, ack_ids text[], by interval,
                                           OUT done integer, OUT refused text[], OUT reasons text[])
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    id   integer := (walbrook.pull_consumer(extend.consumer)).consumer;
    mine tid[];
BEGIN
    IF by IS NULL THEN
        RAISE EXCEPTION 'by is null, but should say by how long'
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'by';
    END IF;
    PERFORM walbrook.check_interval('by', by, 1, 43200);
    EXECUTE format($query$
        SELECT array_agg(f.ctid)
          FROM walbrook.read_ack_ids($1) g,
               LATERAL (SELECT f.ctid
                          FROM walbrook.pull_in_flight_%1$s f
                         WHERE f.consumer = %1$s AND f.commit_lsn = g.commit_lsn
                           AND f.commit_idx = g.commit_idx AND f.lease_id = g.lease_id
                           AND f.lease_until IS NOT NULL
                         LIMIT 1 FOR NO KEY UPDATE) f
         WHERE g.consumer = %1$s
        $query$, id) INTO mine USING ack_ids;
    EXECUTE format($query$
        UPDATE walbrook.pull_in_flight_%1$s f
           SET lease_until = least(greatest(f.lease_until, clock_timestamp()) + $2,
                                   clock_timestamp() + interval '12 hours')
         WHERE f.ctid = ANY ($1)
        $query$, id) USING mine, by;
    GET DIAGNOSTICS done = ROW_COUNT;
    refused := '{}';
    reasons := '{}';
    IF done < cardinality(ack_ids) THEN
        SELECT r.refused, r.reasons INTO refused, reasons FROM walbrook.refusals(id, ack_ids, false, true) r;
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.extend IS 'Keep messages for longer: their deadline moves by this much, at most to twelve hours from now.';

-- For a claim on behalf of a request that had gone before it got the answer: undoes the claim.
CREATE OR REPLACE FUNCTION walbrook.give_back(consumer text, ack_ids text[]) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    id   integer := (walbrook.pull_consumer(give_back.consumer)).consumer;
    mine tid[];
    done integer;
BEGIN
    EXECUTE format($query$
        SELECT array_agg(f.ctid)
          FROM walbrook.read_ack_ids($1) g,
               LATERAL (SELECT f.ctid
                          FROM walbrook.pull_in_flight_%1$s f
                         WHERE f.consumer = %1$s AND f.commit_lsn = g.commit_lsn
                           AND f.commit_idx = g.commit_idx AND f.lease_id = g.lease_id
                         LIMIT 1 FOR NO KEY UPDATE) f
         WHERE g.consumer = %1$s
        $query$, id) INTO mine USING ack_ids;
    EXECUTE format($query$
        UPDATE walbrook.pull_in_flight_%1$s f
           SET lease_id = NULL, lease_until = NULL, deliveries = f.deliveries - 1,
               due_at = clock_timestamp()
         WHERE f.ctid = ANY ($1)
        $query$, id) USING mine;
    GET DIAGNOSTICS done = ROW_COUNT;
    PERFORM pg_notify('walbrook_pull', id::text);
    RETURN done;
END
$$;
