-- How much of the change log one consumer may hold, and what happens to that consumer beyond it.

ALTER TABLE walbrook.consumers
    ADD COLUMN backlog_max     bigint CHECK (backlog_max > 0),
    ADD COLUMN backlog_on_full text CHECK (backlog_on_full IN ('warn', 'evict', 'disable')),
    ADD COLUMN backlog_excused boolean NOT NULL DEFAULT true,
    ADD COLUMN disabled_at     timestamptz,
    ADD COLUMN disabled_reason text CHECK (disabled_reason IN ('backlog')),
    ADD CHECK ((backlog_max IS NULL) = (backlog_on_full IS NULL)),
    ADD CHECK ((disabled_at IS NULL) = (disabled_reason IS NULL));

COMMENT ON COLUMN walbrook.consumers.backlog_max IS 'Bytes of the change log that it may hold (max_backlog.size); null: no bound of its own.';
COMMENT ON COLUMN walbrook.consumers.backlog_on_full IS 'What happens beyond backlog_max. warn: a health event. evict: its cursor moves on, and a gap says over what. disable: it is paused and holds the log no longer.';
COMMENT ON COLUMN walbrook.consumers.backlog_excused IS 'Whether the bound waits: until a consumer that is new, was rewound or was disabled has been within it once.';
COMMENT ON COLUMN walbrook.consumers.disabled_at IS 'Since when it holds neither the log nor the restart cursor; it is paused as well, and walbrook.resume ends both.';
COMMENT ON COLUMN walbrook.consumers.disabled_reason IS 'Why it was disabled. backlog: it had more before it than backlog_max.';

CREATE FUNCTION walbrook.backlog(source text, lsn pg_lsn, idx bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum(g.bytes), 0)::bigint FROM walbrook.log_segments g
     WHERE g.source = backlog.source AND (g.first_lsn, g.first_idx) >= (backlog.lsn, backlog.idx)
$$;

COMMENT ON FUNCTION walbrook.backlog IS 'Bytes of the log segments that begin at or behind a cursor; the segment that holds the cursor is left out.';

CREATE FUNCTION walbrook.place_within(source text, bytes_max bigint) RETURNS walbrook.place
LANGUAGE sql STABLE AS $$
    SELECT ROW(g.high_lsn, g.high_idx)::walbrook.place
      FROM (SELECT l.*, coalesce(sum(l.bytes) OVER (ORDER BY l.first_batch DESC
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS behind
              FROM walbrook.log_segments l WHERE l.source = place_within.source) g
     WHERE g.behind <= place_within.bytes_max
     ORDER BY g.first_batch LIMIT 1
$$;

COMMENT ON FUNCTION walbrook.place_within IS 'The first segment boundary of a log with no more than bytes_max behind it.';

CREATE VIEW walbrook.backlogs AS
SELECT c.source, c.name AS consumer, walbrook.backlog(c.source, c.cursor_lsn, c.cursor_idx) AS bytes,
       c.backlog_max AS max_bytes, c.backlog_on_full AS on_full, c.backlog_excused AS excused,
       c.disabled_at, c.disabled_reason
  FROM walbrook.consumers c
 WHERE c.active;

COMMENT ON VIEW walbrook.backlogs IS 'How much of the change log each active consumer has before it, in whole segments, and its bound.';

-- For one consumer that cannot have what stands before it, such as a damaged part of the log.
CREATE FUNCTION walbrook.skip_to(consumer text, to_cursor text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(skip_to.consumer);
    target walbrook.place := walbrook.parse_cursor(to_cursor);
    log_end walbrook.place := walbrook.end_for(c);
BEGIN
    IF target <= ROW(c.cursor_lsn, c.cursor_idx)::walbrook.place THEN
        RAISE EXCEPTION '% stands at %:%, not before %', c.name, c.cursor_lsn, c.cursor_idx, to_cursor
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'there is nothing to skip; to go back, walbrook.rewind';
    END IF;
    IF target > log_end THEN
        RAISE EXCEPTION '% is beyond the end of the change log of %, which is %:%', to_cursor,
                        c.source, log_end.lsn, log_end.idx
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'to give up everything up to the end, walbrook.discard_all';
    END IF;
    INSERT INTO walbrook.gaps (source, consumer, from_lsn, from_idx, to_lsn, to_idx, reason)
    VALUES (c.source, c.name, c.cursor_lsn, c.cursor_idx, target.lsn, target.idx, 'skipped')
        ON CONFLICT ON CONSTRAINT gaps_source_consumer_from_lsn_from_idx_key
        DO UPDATE SET to_lsn = excluded.to_lsn, to_idx = excluded.to_idx, reason = excluded.reason,
                      noted_at = excluded.noted_at, told_at = NULL;
    UPDATE walbrook.consumers k
       SET cursor_lsn = target.lsn, cursor_idx = target.idx, moved_at = clock_timestamp()
     WHERE k.id = c.id;
    RETURN walbrook.acted(c.id, 'skip_to', 0);
END
$$;

COMMENT ON FUNCTION walbrook.skip_to IS 'Move one consumer forward to a cursor and go on without what it lacks before it; a row of walbrook.gaps says from where to where, and its sink is told.';
