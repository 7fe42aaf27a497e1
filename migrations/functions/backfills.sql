-- Backfills: started, paused, resumed, cancelled, retried, skipped.

CREATE OR REPLACE FUNCTION walbrook.start_backfill(
    consumer text, "table" text, where_sql text DEFAULT NULL, sort_column text DEFAULT NULL,
    start_position text DEFAULT NULL, chunk_bytes bigint DEFAULT NULL,
    rows_per_second bigint DEFAULT NULL, connections integer DEFAULT NULL, reload boolean DEFAULT false)
RETURNS walbrook.backfills
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c walbrook.consumers;
    answer walbrook.backfills;
    parts text[];
    open walbrook.backfills;
BEGIN
    c := walbrook.find_consumer(start_backfill.consumer);
    parts := pg_catalog.parse_ident(start_backfill."table");
    IF cardinality(parts) = 1 THEN
        parts := ARRAY['public', parts[1]];
    END IF;
    IF cardinality(parts) IS DISTINCT FROM 2 THEN
        RAISE EXCEPTION '''%'' is not a table', start_backfill."table"
            USING ERRCODE = 'invalid_parameter_value', HINT = 'write it as schema.table';
    END IF;
    IF EXISTS (SELECT FROM walbrook.event_time e WHERE e.consumer = c.name) THEN
        RAISE EXCEPTION 'consumer % is in the order of event time or processing time, in which existing rows have no place', c.name
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'backfill a consumer in commit order';
    END IF;
    IF start_backfill.reload AND c.reload_refusal IS NOT NULL THEN
        RAISE EXCEPTION 'consumer % cannot be reloaded: %', c.name, c.reload_refusal
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = CASE WHEN cardinality(c.rewind_ways) > 0
                              THEN format('rewind it with destination => %L, or give the rows to a new sink with initial_backfill: true', c.rewind_ways[cardinality(c.rewind_ways)])
                              ELSE 'backfill without reload, or give the rows to a new sink with initial_backfill: true' END;
    END IF;
    IF start_backfill.reload AND (where_sql IS NOT NULL OR start_position IS NOT NULL) THEN
        RAISE EXCEPTION 'a reload is of all rows of a table, and takes neither where_sql nor start_position'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'leave them out, or backfill without reload';
    END IF;
    IF start_position IS NOT NULL AND sort_column IS NULL THEN
        RAISE EXCEPTION 'start_position is a value of sort_column, which is not given'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'give both, or neither';
    END IF;
    SELECT * INTO open FROM walbrook.backfills b
     WHERE b.source = c.source AND b.consumer = c.name AND b.table_schema = parts[1]
       AND b.table_name = parts[2] AND b.state IN ('waiting', 'running', 'paused', 'failed')
     ORDER BY b.id LIMIT 1;
    IF open.state = 'failed' THEN
        RAISE EXCEPTION 'backfill % of % into % has failed, and another can start when it has ended', open.id, array_to_string(parts, '.'), c.name
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('walbrook backfill retry %1$s goes on with it; walbrook backfill cancel %1$s ends it', open.id);
    ELSIF open.id IS NOT NULL THEN
        RAISE EXCEPTION 'backfill % of % into % is under way', open.id, array_to_string(parts, '.'), c.name
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'walbrook.backfill_progress shows it; wait for its end, or cancel it';
    END IF;
    INSERT INTO walbrook.backfills AS b
           (source, consumer, table_schema, table_name, where_sql, sort_column, start_position,
            chunk_bytes, rows_per_second, connections, reload)
    VALUES (c.source, c.name, parts[1], parts[2], start_backfill.where_sql, start_backfill.sort_column,
            start_backfill.start_position, coalesce(start_backfill.chunk_bytes, 67108864),
            start_backfill.rows_per_second, coalesce(start_backfill.connections, 2),
            coalesce(start_backfill.reload, false))
    RETURNING b.* INTO answer;
    PERFORM walbrook.announce(c.source, c.name, 'start_backfill');
    -- Of what may hold values of rows only that it was given.
    PERFORM walbrook.note_act('start_backfill', jsonb_build_object(
        'source', c.source, 'consumer', c.name, 'table', array_to_string(parts, '.'),
        'id', answer.id, 'has_where', nullif(answer.where_sql IS NOT NULL, false),
        'sort_column', answer.sort_column,
        'has_start_position', nullif(answer.start_position IS NOT NULL, false),
        'reload', nullif(answer.reload, false)));
    RETURN answer;
END
$$;

COMMENT ON FUNCTION walbrook.start_backfill IS 'Deliver the existing rows of a table to a consumer, among its changes. where_sql: only some of them; sort_column and start_position: in an order, from a value on; rows_per_second: at most so many. reload: into a shadow of the destination''s table, which takes its place when all rows are there.';

CREATE OR REPLACE FUNCTION walbrook.leaves_shadow(b walbrook.backfills) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT b.reload AND b.state IN ('cancelled', 'skipped')
           AND EXISTS (SELECT FROM walbrook.backfill_chunks k
                        WHERE k.backfill = b.id AND k.kind = 'drop' AND k.state <> 'done')
$$;

COMMENT ON FUNCTION walbrook.leaves_shadow IS 'Whether a reload was cancelled or skipped, and its sink has yet to drop its shadow.';

-- What was read is in no log, so nothing but another read brings it to another place.
CREATE OR REPLACE FUNCTION walbrook.backfill_again(c walbrook.consumers) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    ended text;
BEGIN
    UPDATE walbrook.backfill_chunks k
       SET state = 'planned', snapshot = NULL, read_lsn = NULL, look_lsn = NULL, file = NULL,
           rows = NULL, bytes = NULL, delivered = 0, piece_rows = NULL, place_lsn = NULL,
           place_idx = NULL, done_at = NULL
      FROM walbrook.backfills b
     WHERE b.id = k.backfill AND b.source = c.source AND b.consumer = c.name
       AND b.state IN ('waiting', 'running', 'paused', 'failed')
       AND k.state IN ('read', 'delivering', 'done');
    -- The shadow of a reload is in the other place: another begins, and is swapped in when it is whole.
    DELETE FROM walbrook.backfill_chunks k USING walbrook.backfills b
     WHERE b.id = k.backfill AND b.source = c.source AND b.consumer = c.name
       AND b.state IN ('waiting', 'running', 'paused', 'failed') AND k.kind = 'swap';
    UPDATE walbrook.backfills b SET begun_lsn = NULL
     WHERE b.source = c.source AND b.consumer = c.name
       AND b.state IN ('waiting', 'running', 'paused', 'failed') AND b.begun_lsn IS NOT NULL;
    SELECT string_agg(named.t, ', ' ORDER BY named.t) INTO ended
      FROM (SELECT DISTINCT b.table_schema || '.' || b.table_name AS t FROM walbrook.backfills b
             WHERE b.source = c.source AND b.consumer = c.name
               AND b.state IN ('done', 'cancelled', 'skipped') ORDER BY 1 LIMIT 20) named;
    IF ended IS NOT NULL THEN
        RAISE WARNING 'existing rows that % got by backfills which have ended do not come again: %', c.name, ended
            USING HINT = 'start them again, with walbrook.start_backfill';
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.backfill_again IS 'Read again all that a consumer''s backfills under way have read: its destination is empty.';

CREATE OR REPLACE FUNCTION walbrook.change_backfill(backfill bigint, allowed text[], state text, action text)
RETURNS walbrook.backfills
LANGUAGE plpgsql AS $$
DECLARE
    answer walbrook.backfills;
BEGIN
    SELECT * INTO answer FROM walbrook.backfills b WHERE b.id = backfill FOR UPDATE;
    IF answer.id IS NULL THEN
        RAISE EXCEPTION 'there is no backfill %', backfill
            USING ERRCODE = 'no_data_found', HINT = 'walbrook.backfill_progress lists them';
    END IF;
    IF answer.state <> ALL (allowed) THEN
        RAISE EXCEPTION 'backfill % is %: it cannot be changed so', backfill, answer.state
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'this is for backfills that are ' || array_to_string(allowed, ', ');
    END IF;
    UPDATE walbrook.backfills b
       SET state = change_backfill.state,
           reason = NULL, waits_for = NULL, waits_since = NULL,
           error = CASE WHEN change_backfill.state = 'waiting' THEN NULL ELSE b.error END,
           attempts = CASE WHEN change_backfill.state = 'waiting' THEN 0 ELSE b.attempts END,
           finished_at = CASE WHEN change_backfill.state IN ('cancelled', 'skipped')
                              THEN clock_timestamp() END
     WHERE b.id = backfill RETURNING b.* INTO answer;
    IF answer.reload AND answer.state IN ('cancelled', 'skipped') THEN
        INSERT INTO walbrook.backfill_chunks
               (backfill, number, leaf_schema, leaf_name, leaf_oid, filenode, kind)
        SELECT answer.id, max(k.number) + 1, answer.table_schema, answer.table_name, 0, 0, 'drop'
          FROM walbrook.backfill_chunks k WHERE k.backfill = answer.id
        HAVING bool_or(k.kind = 'begin' AND k.state IN ('delivering', 'done'));
    END IF;
    PERFORM walbrook.announce(answer.source, answer.consumer, action);
    PERFORM walbrook.note_act(action, jsonb_build_object(
        'source', answer.source, 'consumer', answer.consumer, 'id', answer.id));
    RETURN answer;
END
$$;

CREATE OR REPLACE FUNCTION walbrook.pause_backfill(backfill bigint) RETURNS walbrook.backfills
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT walbrook.change_backfill(backfill, ARRAY['waiting', 'running'], 'paused', 'pause_backfill')
$$;

COMMENT ON FUNCTION walbrook.pause_backfill IS 'Read and deliver nothing more of a backfill until it is resumed; changes go on.';

CREATE OR REPLACE FUNCTION walbrook.resume_backfill(backfill bigint) RETURNS walbrook.backfills
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT walbrook.change_backfill(backfill, ARRAY['paused'], 'waiting', 'resume_backfill')
$$;

COMMENT ON FUNCTION walbrook.resume_backfill IS 'Go on with a paused backfill where it stopped.';

CREATE OR REPLACE FUNCTION walbrook.cancel_backfill(backfill bigint) RETURNS walbrook.backfills
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT walbrook.change_backfill(backfill, ARRAY['waiting', 'running', 'paused', 'failed'],
                                    'cancelled', 'cancel_backfill')
$$;

COMMENT ON FUNCTION walbrook.cancel_backfill IS 'End a backfill; what was delivered stays delivered. Of a reload: its shadow is dropped.';

CREATE OR REPLACE FUNCTION walbrook.retry_backfill(backfill bigint) RETURNS walbrook.backfills
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT walbrook.change_backfill(backfill, ARRAY['failed'], 'waiting', 'retry_backfill')
$$;

COMMENT ON FUNCTION walbrook.retry_backfill IS 'Go on with a failed backfill; what is done is not done again.';

CREATE OR REPLACE FUNCTION walbrook.skip_backfill(backfill bigint) RETURNS walbrook.backfills
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT walbrook.change_backfill(backfill, ARRAY['failed'], 'skipped', 'skip_backfill')
$$;

COMMENT ON FUNCTION walbrook.skip_backfill IS 'Go on without the rest of a failed backfill.';
