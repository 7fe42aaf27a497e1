-- Verifications: started and cancelled.

CREATE OR REPLACE FUNCTION walbrook.start_verification(
    consumer text, "table" text DEFAULT NULL, repair boolean DEFAULT false)
RETURNS walbrook.verifications
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
    PERFORM walbrook.note_act('start_verification', jsonb_build_object(
        'source', c.source, 'consumer', c.name, 'table', start_verification."table",
        'repair', answer.repair, 'id', answer.id));
    RETURN answer;
END
$$;

COMMENT ON FUNCTION walbrook.start_verification IS 'Compare what a consumer''s destination holds of a table, or of all its tables, with the source. repair: deliver rows that differ again.';

CREATE OR REPLACE FUNCTION walbrook.cancel_verification(verification bigint)
RETURNS walbrook.verifications
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
    PERFORM walbrook.note_act('cancel_verification', jsonb_build_object(
        'source', answer.source, 'consumer', answer.consumer, 'id', answer.id));
    RETURN answer;
END
$$;

COMMENT ON FUNCTION walbrook.cancel_verification IS 'End a verification; a repair that it began goes on as a backfill.';
