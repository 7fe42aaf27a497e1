-- Backfills: rows that exist already, read in chunks and delivered among the changes.

CREATE TABLE walbrook.backfills (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source          text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    consumer        text NOT NULL,
    table_schema    text NOT NULL,
    table_name      text NOT NULL,
    state           text NOT NULL DEFAULT 'waiting'
                    CHECK (state IN ('waiting', 'running', 'paused', 'failed', 'done', 'cancelled', 'skipped')),
    reason          text,
    waits_for       text CHECK (waits_for IN ('open_transactions', 'source', 'retry')),
    waits_since     timestamptz,
    -- What was asked for.
    where_sql       text,
    sort_column     text,
    start_position  text,
    chunk_bytes     bigint NOT NULL DEFAULT 67108864 CHECK (chunk_bytes > 0),
    rows_per_second bigint CHECK (rows_per_second > 0),
    connections     integer NOT NULL DEFAULT 2 CHECK (connections BETWEEN 1 AND 64),
    -- What is known of it.
    planned         boolean NOT NULL DEFAULT false,
    estimated_rows  bigint,
    estimated_bytes bigint,
    looked_lsn      pg_lsn,
    attempts        integer NOT NULL DEFAULT 0,
    error           text,
    requested_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at      timestamptz,
    finished_at     timestamptz,
    FOREIGN KEY (source, consumer) REFERENCES walbrook.consumers (source, name) ON DELETE CASCADE
);

CREATE UNIQUE INDEX backfills_open ON walbrook.backfills (source, consumer, table_schema, table_name)
 WHERE state IN ('waiting', 'running', 'paused', 'failed');

COMMENT ON TABLE walbrook.backfills IS 'One row per table that a consumer gets the existing rows of.';
COMMENT ON COLUMN walbrook.backfills.state IS 'waiting: nothing is read yet, see reason; running; paused: by an operator; failed: see error, walbrook.retry_backfill or walbrook.skip_backfill; done; cancelled: what was delivered stays; skipped.';
COMMENT ON COLUMN walbrook.backfills.reason IS 'What it waits for; null if for nothing.';
COMMENT ON COLUMN walbrook.backfills.waits_for IS 'open_transactions: transactions that were open before its first chunk have to end, for at most an hour; source: the source does not answer; retry: a chunk could not be read and is read again; null if for nothing.';
COMMENT ON COLUMN walbrook.backfills.where_sql IS 'Only rows for which this SQL expression is true.';
COMMENT ON COLUMN walbrook.backfills.sort_column IS 'Rows are read in the order of this column, from start_position on; null: in the order in which they lie.';
COMMENT ON COLUMN walbrook.backfills.chunk_bytes IS 'About how many bytes of the table one chunk reads.';
COMMENT ON COLUMN walbrook.backfills.rows_per_second IS 'Most rows delivered per second; null: no limit.';
COMMENT ON COLUMN walbrook.backfills.connections IS 'Most chunks that are read at once.';
COMMENT ON COLUMN walbrook.backfills.planned IS 'Whether all of its chunks are in walbrook.backfill_chunks.';
COMMENT ON COLUMN walbrook.backfills.looked_lsn IS 'Up to where the log was searched for changes that left out values of rows.';

CREATE TABLE walbrook.backfill_chunks (
    backfill    bigint NOT NULL REFERENCES walbrook.backfills (id) ON DELETE CASCADE,
    number      integer NOT NULL,
    leaf_schema text NOT NULL,
    leaf_name   text NOT NULL,
    leaf_oid    oid NOT NULL,
    filenode    bigint NOT NULL,
    kind        text NOT NULL CHECK (kind IN ('blocks', 'values', 'keys')),
    first_block bigint,
    end_block   bigint,
    after_value text,
    until_value text,
    state       text NOT NULL DEFAULT 'planned'
                CHECK (state IN ('planned', 'read', 'delivering', 'done', 'replaced')),
    -- How it was read.
    snapshot    text,
    read_lsn    pg_lsn,
    look_lsn    pg_lsn,
    file        text,
    rows        bigint,
    bytes       bigint,
    -- How far it is delivered: the piece under way has its own place among the changes.
    delivered   bigint NOT NULL DEFAULT 0,
    piece_rows  bigint,
    place_lsn   pg_lsn,
    place_idx   bigint,
    dropped     bigint NOT NULL DEFAULT 0,
    merged      bigint NOT NULL DEFAULT 0,
    attempts    integer NOT NULL DEFAULT 0,
    error       text,
    read_at     timestamptz,
    done_at     timestamptz,
    PRIMARY KEY (backfill, number)
);

COMMENT ON TABLE walbrook.backfill_chunks IS 'The parts of a backfill: each is read in one short transaction, and delivered in pieces.';
COMMENT ON COLUMN walbrook.backfill_chunks.filenode IS 'The file in which its blocks lay when it was planned; another one means that they have moved.';
COMMENT ON COLUMN walbrook.backfill_chunks.kind IS 'blocks: by ctid; values: by a column; keys: rows whose values a change left out, read once more.';
COMMENT ON COLUMN walbrook.backfill_chunks.snapshot IS 'pg_current_snapshot() of its transaction: changes that it does not contain are newer.';
COMMENT ON COLUMN walbrook.backfill_chunks.read_lsn IS 'It is delivered once the log has passed this.';
COMMENT ON COLUMN walbrook.backfill_chunks.look_lsn IS 'From where on the log is searched for newer changes.';
COMMENT ON COLUMN walbrook.backfill_chunks.place_lsn IS 'With place_idx: the cursor of the first row of the piece under way.';
COMMENT ON COLUMN walbrook.backfill_chunks.dropped IS 'Rows that a newer change had overtaken.';
COMMENT ON COLUMN walbrook.backfill_chunks.merged IS 'Rows that a newer change had overtaken without sending all of their values.';

-- Keys of rows whose values an update left out while they may have been read by no chunk.
CREATE TABLE walbrook.backfill_keys (
    backfill bigint NOT NULL REFERENCES walbrook.backfills (id) ON DELETE CASCADE,
    key      jsonb NOT NULL,
    PRIMARY KEY (backfill, key)
);

COMMENT ON TABLE walbrook.backfill_keys IS 'Rows that are read once more by their key after the last chunk.';

ALTER TABLE walbrook.consumers ADD COLUMN initial_backfill text[];

COMMENT ON COLUMN walbrook.consumers.initial_backfill IS 'The tables whose existing rows it is still to get as a new consumer, * for all; null: none, or they are in walbrook.backfills.';

CREATE VIEW walbrook.backfill_progress AS
SELECT b.id, b.source, b.consumer, b.table_schema, b.table_name, b.state, b.reason, b.waits_for,
       b.waits_since, b.error,
       b.planned, c.chunks, c.chunks_done, coalesce(c.read, 0) AS rows_read, coalesce(c.delivered, 0) AS rows,
       coalesce(c.dropped, 0) AS dropped, coalesce(c.merged, 0) AS merged,
       coalesce(c.bytes, 0) AS bytes, b.estimated_rows, b.estimated_bytes,
       CASE WHEN b.state = 'done' THEN 1.0
            WHEN c.chunks > 0 THEN round(c.chunks_done::numeric / c.chunks, 4)
            ELSE 0 END AS fraction,
       r.rate AS rows_per_second,
       CASE WHEN b.state = 'running' AND r.rate > 0
            THEN greatest(b.estimated_rows - coalesce(c.delivered, 0), 0) / r.rate END AS seconds_left,
       c.oldest_snapshot, b.requested_at, b.started_at, b.finished_at
  FROM walbrook.backfills b
  LEFT JOIN LATERAL (
       SELECT count(*) AS chunks, count(*) FILTER (WHERE k.state = 'done') AS chunks_done,
              sum(k.rows)::bigint AS read, sum(k.delivered)::bigint AS delivered,
              sum(k.dropped)::bigint AS dropped, sum(k.merged)::bigint AS merged, sum(k.bytes)::bigint AS bytes,
              min(k.read_at) FILTER (WHERE k.state IN ('read', 'delivering')) AS oldest_snapshot
         FROM walbrook.backfill_chunks k WHERE k.backfill = b.id AND k.state <> 'replaced') c ON true
  LEFT JOIN LATERAL (
       SELECT coalesce(c.delivered, 0) / nullif(extract(epoch FROM
              coalesce(b.finished_at, clock_timestamp()) - b.started_at), 0) AS rate) r ON true;

COMMENT ON VIEW walbrook.backfill_progress IS 'How far each backfill is, how fast, and what it waits for. oldest_snapshot: when the oldest chunk was read that is not delivered; no transaction is held open for it.';

CREATE FUNCTION walbrook.start_backfill(
    consumer text, "table" text, where_sql text DEFAULT NULL, sort_column text DEFAULT NULL,
    start_position text DEFAULT NULL, chunk_bytes bigint DEFAULT NULL,
    rows_per_second bigint DEFAULT NULL, connections integer DEFAULT NULL)
RETURNS walbrook.backfills
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers;
    answer walbrook.backfills;
    parts text[];
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
    IF start_position IS NOT NULL AND sort_column IS NULL THEN
        RAISE EXCEPTION 'start_position is a value of sort_column, which is not given'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'give both, or neither';
    END IF;
    IF EXISTS (SELECT FROM walbrook.backfills b
                WHERE b.source = c.source AND b.consumer = c.name AND b.table_schema = parts[1]
                  AND b.table_name = parts[2]
                  AND b.state IN ('waiting', 'running', 'paused', 'failed')) THEN
        RAISE EXCEPTION 'a backfill of % into % is under way', array_to_string(parts, '.'), c.name
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'walbrook.backfill_progress shows it; cancel it, retry it, or wait for its end';
    END IF;
    INSERT INTO walbrook.backfills AS b
           (source, consumer, table_schema, table_name, where_sql, sort_column, start_position,
            chunk_bytes, rows_per_second, connections)
    VALUES (c.source, c.name, parts[1], parts[2], start_backfill.where_sql, start_backfill.sort_column,
            start_backfill.start_position, coalesce(start_backfill.chunk_bytes, 67108864),
            start_backfill.rows_per_second, coalesce(start_backfill.connections, 2))
    RETURNING b.* INTO answer;
    PERFORM walbrook.announce(c.source, c.name, 'start_backfill');
    RETURN answer;
END
$$;

COMMENT ON FUNCTION walbrook.start_backfill IS 'Deliver the existing rows of a table to a consumer, among its changes. where_sql: only some of them; sort_column and start_position: in an order, from a value on; rows_per_second: at most so many.';

CREATE FUNCTION walbrook.change_backfill(backfill bigint, allowed text[], state text, action text)
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
    PERFORM walbrook.announce(answer.source, answer.consumer, action);
    RETURN answer;
END
$$;

CREATE FUNCTION walbrook.pause_backfill(backfill bigint) RETURNS walbrook.backfills
LANGUAGE sql AS $$
    SELECT walbrook.change_backfill(backfill, ARRAY['waiting', 'running'], 'paused', 'pause_backfill')
$$;

COMMENT ON FUNCTION walbrook.pause_backfill IS 'Read and deliver nothing more of a backfill until it is resumed; changes go on.';

CREATE FUNCTION walbrook.resume_backfill(backfill bigint) RETURNS walbrook.backfills
LANGUAGE sql AS $$
    SELECT walbrook.change_backfill(backfill, ARRAY['paused'], 'waiting', 'resume_backfill')
$$;

COMMENT ON FUNCTION walbrook.resume_backfill IS 'Go on with a paused backfill where it stopped.';

CREATE FUNCTION walbrook.cancel_backfill(backfill bigint) RETURNS walbrook.backfills
LANGUAGE sql AS $$
    SELECT walbrook.change_backfill(backfill, ARRAY['waiting', 'running', 'paused', 'failed'],
                                    'cancelled', 'cancel_backfill')
$$;

COMMENT ON FUNCTION walbrook.cancel_backfill IS 'End a backfill; what was delivered stays delivered.';

CREATE FUNCTION walbrook.retry_backfill(backfill bigint) RETURNS walbrook.backfills
LANGUAGE sql AS $$
    SELECT walbrook.change_backfill(backfill, ARRAY['failed'], 'waiting', 'retry_backfill')
$$;

COMMENT ON FUNCTION walbrook.retry_backfill IS 'Go on with a failed backfill; what is done is not done again.';

CREATE FUNCTION walbrook.skip_backfill(backfill bigint) RETURNS walbrook.backfills
LANGUAGE sql AS $$
    SELECT walbrook.change_backfill(backfill, ARRAY['failed'], 'skipped', 'skip_backfill')
$$;

COMMENT ON FUNCTION walbrook.skip_backfill IS 'Go on without the rest of a failed backfill.';

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
