-- Every position that the service holds is a row here, for anyone to read.

CREATE TABLE walbrook.sources (
    name              text PRIMARY KEY,
    slot              text NOT NULL,
    publication       text NOT NULL,
    system_identifier text NOT NULL,
    -- Raised by every start of the service; what an older one still tries to settle is refused.
    term              bigint NOT NULL DEFAULT 0,
    -- The restart cursor: everything below it is settled for every consumer. It never goes back.
    restart_lsn       pg_lsn NOT NULL,
    restart_idx       bigint NOT NULL DEFAULT 0,
    restart_at        timestamptz NOT NULL DEFAULT now(),
    -- What the reader last saw: the end of the source's WAL, and the end of the change log.
    head_lsn          pg_lsn,
    log_lsn           pg_lsn,
    log_idx           bigint,
    seen_at           timestamptz,
    -- Everything that was committed before this moment has been read.
    current_at        timestamptz,
    state             text NOT NULL DEFAULT 'stopped'
                      CHECK (state IN ('stopped', 'connecting', 'streaming', 'paused', 'disconnected')),
    state_since       timestamptz NOT NULL DEFAULT now(),
    last_error        text,
    created_at        timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE walbrook.consumers (
    source         text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    name           text NOT NULL,
    -- Everything below is settled for this consumer.
    cursor_lsn     pg_lsn NOT NULL,
    cursor_idx     bigint NOT NULL DEFAULT 0,
    -- Commit time of the last settled change.
    settled_commit timestamptz,
    moved_at       timestamptz NOT NULL DEFAULT now(),
    delivered      bigint NOT NULL DEFAULT 0,
    absorbed       bigint NOT NULL DEFAULT 0,
    -- Consumers that the configuration no longer names keep their row and hold nothing back.
    active         boolean NOT NULL DEFAULT true,
    last_error     text,
    error_at       timestamptz,
    created_at     timestamptz NOT NULL DEFAULT now(),
    -- A destination that keeps a position: where it is, the last message that it was sent, and since
    -- when it is known to lack some that it had.
    place          text NOT NULL DEFAULT '',
    top_lsn        pg_lsn,
    top_idx        bigint,
    lost_at        timestamptz,
    -- What a rewind may do with what the destination holds; none where the destination keeps no
    -- position and simply gets everything again.
    rewind_ways    text[] NOT NULL DEFAULT '{}',
    -- Which place of the destination is in use, and how often that place was emptied. Both grow by
    -- walbrook.rewind alone.
    generation     integer NOT NULL DEFAULT 1,
    truncation     integer NOT NULL DEFAULT 0,
    PRIMARY KEY (source, name)
);

COMMENT ON COLUMN walbrook.consumers.place IS 'Where its destination is, if that keeps a position of its own.';
COMMENT ON COLUMN walbrook.consumers.top_lsn IS 'With top_idx: the last message that its destination was sent, if that keeps a position of its own.';
COMMENT ON COLUMN walbrook.consumers.lost_at IS 'When its destination was found to lack messages that it once had; walbrook.accept_loss sets it back.';
COMMENT ON COLUMN walbrook.consumers.rewind_ways IS 'What walbrook.rewind takes as destination: new_generation, truncate.';
COMMENT ON COLUMN walbrook.consumers.generation IS 'Which place of its destination is in use: 1 is the configured one, each rewind with destination => ''new_generation'' begins the next.';
COMMENT ON COLUMN walbrook.consumers.truncation IS 'How often the place of this generation was emptied by a rewind with destination => ''truncate''.';
COMMENT ON TABLE walbrook.sources IS 'One row a source database: its slot, its restart cursor, the state of its reader.';
COMMENT ON TABLE walbrook.consumers IS 'One row a consumer (a configured sink): its cursor and its counts.';

-- How many seconds a reader is behind the clock. Its row is written about every ten seconds, so a
-- younger one means that it reads.
CREATE FUNCTION walbrook.reader_lag(current_at timestamptz) RETURNS numeric
LANGUAGE sql VOLATILE AS $$
    SELECT CASE WHEN current_at < clock_timestamp() - interval '30 seconds'
                THEN extract(epoch FROM clock_timestamp() - current_at) ELSE 0 END
$$;

-- The restart cursor of each source (consumer is null) and the cursor of each active consumer.
-- lag_seconds is 0 when everything that the log holds is settled, else the age of the last
-- settled change. A reader that does not read is behind too, by the clock: the log does not show it.
CREATE VIEW walbrook.cursors AS
SELECT s.name AS source,
       NULL::text AS consumer,
       s.restart_lsn || ':' || s.restart_idx AS cursor,
       s.restart_lsn AS lsn,
       s.restart_idx AS idx,
       greatest(s.head_lsn - s.restart_lsn, 0)::bigint AS lag_bytes,
       greatest(
           CASE WHEN ((s.restart_lsn, s.restart_idx) < (s.log_lsn, s.log_idx)) IS NOT TRUE THEN 0
                ELSE extract(epoch FROM clock_timestamp() - s.restart_at) END,
           walbrook.reader_lag(s.current_at))::float8 AS lag_seconds,
       s.restart_at AS moved_at
  FROM walbrook.sources s
UNION ALL
SELECT c.source,
       c.name,
       c.cursor_lsn || ':' || c.cursor_idx,
       c.cursor_lsn,
       c.cursor_idx,
       greatest(s.head_lsn - c.cursor_lsn, 0)::bigint,
       greatest(
           CASE WHEN ((c.cursor_lsn, c.cursor_idx) < (s.log_lsn, s.log_idx)) IS NOT TRUE THEN 0
                ELSE extract(epoch FROM clock_timestamp() - coalesce(c.settled_commit, c.moved_at)) END,
           walbrook.reader_lag(s.current_at))::float8,
       c.moved_at
  FROM walbrook.consumers c
  JOIN walbrook.sources s ON s.name = c.source
 WHERE c.active;

COMMENT ON VIEW walbrook.cursors IS 'Where every source and consumer stands, how far behind, and when it last moved.';
