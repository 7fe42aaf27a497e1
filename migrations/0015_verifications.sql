-- Verifications: whether a destination holds the rows that its source holds.

CREATE TABLE walbrook.verifications (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    request          bigint,
    source           text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    consumer         text NOT NULL,
    table_schema     text,
    table_name       text,
    repair           boolean NOT NULL DEFAULT false,
    state            text NOT NULL DEFAULT 'waiting'
                     CHECK (state IN ('waiting', 'reading', 'comparing', 'repairing', 'done', 'failed', 'cancelled')),
    reason           text,
    error            text,
    -- How far it is.
    parts            bigint,
    parts_done       bigint NOT NULL DEFAULT 0,
    -- What was found.
    position         pg_lsn,
    source_rows      bigint,
    destination_rows bigint,
    missing          bigint,
    extra            bigint,
    different        bigint,
    changing         bigint,
    backfill         bigint,
    repaired         bigint,
    requested_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at       timestamptz,
    finished_at      timestamptz,
    FOREIGN KEY (source, consumer) REFERENCES walbrook.consumers (source, name) ON DELETE CASCADE
);

CREATE INDEX verifications_open ON walbrook.verifications (source, consumer)
 WHERE state IN ('waiting', 'reading', 'comparing', 'repairing');
CREATE INDEX verifications_request ON walbrook.verifications (request);

COMMENT ON TABLE walbrook.verifications IS 'One row per comparison of a table at the source with what a consumer''s destination holds.';
COMMENT ON COLUMN walbrook.verifications.request IS 'The same for all tables that were asked for at once.';
COMMENT ON COLUMN walbrook.verifications.table_name IS 'Null: all tables of the consumer, until they are known.';
COMMENT ON COLUMN walbrook.verifications.repair IS 'Whether rows that differ are delivered again.';
COMMENT ON COLUMN walbrook.verifications.state IS 'waiting: nothing is read yet; reading: the rows of both sides are read; comparing: rows that differed are looked at again; repairing: rows that differ are delivered again; done; failed: see error; cancelled.';
COMMENT ON COLUMN walbrook.verifications.reason IS 'What it waits for; null if for nothing.';
COMMENT ON COLUMN walbrook.verifications.parts IS 'Chunks of the source to read, and one part each for the destination and the comparison.';
COMMENT ON COLUMN walbrook.verifications.position IS 'Rows that have not changed since this position were compared as they are.';
COMMENT ON COLUMN walbrook.verifications.source_rows IS 'How many rows the source had while it was read.';
COMMENT ON COLUMN walbrook.verifications.destination_rows IS 'How many rows the destination had while it was read.';
COMMENT ON COLUMN walbrook.verifications.missing IS 'Rows of the source that the destination lacks.';
COMMENT ON COLUMN walbrook.verifications.extra IS 'Rows of the destination that the source does not have.';
COMMENT ON COLUMN walbrook.verifications.different IS 'Rows that both have with other values.';
COMMENT ON COLUMN walbrook.verifications.changing IS 'Rows that changed each time they were looked at: nothing is known of them.';
COMMENT ON COLUMN walbrook.verifications.backfill IS 'The backfill that delivers rows again.';
COMMENT ON COLUMN walbrook.verifications.repaired IS 'Of the rows that differed, how many are equal after the repair.';

-- Keys are values of rows: only who may read rows may read this table.
CREATE TABLE walbrook.verification_keys (
    verification bigint NOT NULL REFERENCES walbrook.verifications (id) ON DELETE CASCADE,
    key          jsonb NOT NULL,
    difference   text NOT NULL CHECK (difference IN ('missing', 'extra', 'different')),
    repaired     boolean NOT NULL DEFAULT false,
    PRIMARY KEY (verification, key)
);

COMMENT ON TABLE walbrook.verification_keys IS 'The keys of rows that differ, up to 10000, of the latest verification of each table.';
COMMENT ON COLUMN walbrook.verification_keys.key IS 'The values of the key as text, in key order.';

CREATE VIEW walbrook.verified AS
SELECT DISTINCT ON (v.source, v.consumer, v.table_schema, v.table_name)
       v.source, v.consumer, v.table_schema, v.table_name, e.position AS verified_through,
       e.finished_at AS verified_at, v.id AS last_verification, v.state AS last_state,
       v.missing + v.extra + v.different - coalesce(v.repaired, 0) AS last_differences
  FROM walbrook.verifications v
  LEFT JOIN LATERAL (
       SELECT w.position, w.finished_at FROM walbrook.verifications w
        WHERE w.source = v.source AND w.consumer = v.consumer AND w.table_schema = v.table_schema
          AND w.table_name = v.table_name AND w.state = 'done' AND w.changing = 0
          AND w.missing + w.extra + w.different = coalesce(w.repaired, 0)
        ORDER BY w.position DESC LIMIT 1) e ON true
 WHERE v.table_name IS NOT NULL
 ORDER BY v.source, v.consumer, v.table_schema, v.table_name, v.id DESC;

COMMENT ON VIEW walbrook.verified IS 'Per consumer and table: up to which position all rows were found equal (verified_through, null if never), and what the latest comparison came to.';

CREATE FUNCTION walbrook.start_verification(
    consumer text, "table" text DEFAULT NULL, repair boolean DEFAULT false)
RETURNS walbrook.verifications
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers;
    answer walbrook.verifications;
    named text[];
BEGIN
    c := walbrook.find_consumer(start_verification.consumer);
    IF start_verification."table" IS NOT NULL THEN
        named := pg_catalog.parse_ident(start_verification."table");
        IF cardinality(named) = 1 THEN
            named := ARRAY['public', named[1]];
        END IF;
        IF cardinality(named) IS DISTINCT FROM 2 THEN
            RAISE EXCEPTION '''%'' is not a table', start_verification."table"
                USING ERRCODE = 'invalid_parameter_value', HINT = 'write it as schema.table';
        END IF;
    END IF;
    IF EXISTS (SELECT FROM walbrook.event_time e WHERE e.consumer = c.name) THEN
        RAISE EXCEPTION 'consumer % is in the order of event time or processing time, and what it holds cannot be compared', c.name
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'verify a consumer in commit order';
    END IF;
    IF EXISTS (SELECT FROM walbrook.verifications v
                WHERE v.source = c.source AND v.consumer = c.name
                  AND (v.table_name IS NULL OR named IS NULL OR v.table_schema = named[1] AND v.table_name = named[2])
                  AND v.state IN ('waiting', 'reading', 'comparing', 'repairing')) THEN
        RAISE EXCEPTION 'a verification of % is under way', c.name
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'walbrook.verifications shows it; cancel it, or wait for its end';
    END IF;
    INSERT INTO walbrook.verifications AS v (source, consumer, table_schema, table_name, repair)
    VALUES (c.source, c.name, named[1], named[2], start_verification.repair)
    RETURNING v.* INTO answer;
    UPDATE walbrook.verifications v SET request = v.id WHERE v.id = answer.id RETURNING v.* INTO answer;
    PERFORM walbrook.announce(c.source, c.name, 'start_verification');
    RETURN answer;
END
$$;

COMMENT ON FUNCTION walbrook.start_verification IS 'Compare what a consumer''s destination holds of a table, or of all its tables, with the source. repair: deliver rows that differ again.';

CREATE FUNCTION walbrook.cancel_verification(verification bigint)
RETURNS walbrook.verifications
LANGUAGE plpgsql AS $$
DECLARE
    answer walbrook.verifications;
BEGIN
    UPDATE walbrook.verifications v
       SET state = 'cancelled', reason = NULL, finished_at = clock_timestamp()
     WHERE v.id = verification AND v.state IN ('waiting', 'reading', 'comparing', 'repairing')
    RETURNING v.* INTO answer;
    IF answer.id IS NULL THEN
        RAISE EXCEPTION 'there is no verification % under way', verification
            USING ERRCODE = 'no_data_found', HINT = 'walbrook.verifications lists them';
    END IF;
    PERFORM walbrook.announce(answer.source, answer.consumer, 'cancel_verification');
    RETURN answer;
END
$$;

COMMENT ON FUNCTION walbrook.cancel_verification IS 'End a verification; a repair that it began goes on as a backfill.';

DO $$
DECLARE
    called regprocedure;
BEGIN
    FOR called IN SELECT walbrook.functions_of('operator') LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = pg_catalog, pg_temp', called);
    END LOOP;
END
$$;

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA walbrook FROM PUBLIC;
