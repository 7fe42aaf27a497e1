-- Moving a consumer: back, forward, or past everything that waits.

-- The end of the log as its reader last reported, or the consumer itself if that is further.
CREATE OR REPLACE FUNCTION walbrook.end_for(c walbrook.consumers) RETURNS walbrook.place
LANGUAGE sql STABLE AS $$
    SELECT greatest(ROW(coalesce(s.log_lsn, '0/0'), coalesce(s.log_idx, 0))::walbrook.place,
                    ROW(c.cursor_lsn, c.cursor_idx)::walbrook.place)
      FROM walbrook.sources s WHERE s.name = c.source
$$;

-- In event-time order what comes again has a number that its destination has not seen, so it needs
-- no empty place.
CREATE OR REPLACE FUNCTION walbrook.check_rewind_way(c walbrook.consumers, way text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(c.rewind_ways) = 0 OR walbrook.is_numbered(c) THEN
        IF way IS NOT NULL THEN
            RAISE EXCEPTION '% gets everything again as it is: there is nothing to do with what its '
                            'destination (%) holds', c.name, c.destination
                USING ERRCODE = 'invalid_parameter_value', HINT = 'leave destination out';
        END IF;
    ELSIF way IS NULL OR way <> ALL (c.rewind_ways) THEN
        RAISE EXCEPTION '% would get nothing again: its destination (%) keeps a position of its own '
                        'and takes what is below it for repeats', c.name, c.destination
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'say what becomes of what it holds, by '
                         || array_to_string(ARRAY(
                                SELECT 'destination => ' || quote_literal(w) || CASE w
                                       WHEN 'new_generation' THEN ' (it stays, and everything goes to a new place beside it)'
                                       WHEN 'truncate' THEN ' (it is removed, and everything goes to the same place)'
                                       ELSE '' END
                                  FROM unnest(c.rewind_ways) w), ' or ');
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.check_rewind_way IS 'Refuse a rewind that does not say what becomes of what the destination holds, where that matters.';

CREATE OR REPLACE FUNCTION walbrook.takes(c walbrook.consumers, table_schema text, table_name text)
RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT coalesce(c.takes -> 'include_schemas' ? table_schema, true)
       AND NOT coalesce(c.takes -> 'exclude_schemas' ? table_schema, false)
       AND coalesce(c.takes -> 'include_tables' ? (table_schema || '.' || table_name), true)
       AND NOT coalesce(c.takes -> 'exclude_tables' ? (table_schema || '.' || table_name), false)
$$;

COMMENT ON FUNCTION walbrook.takes IS 'Whether the changes of a table are the consumer''s.';

-- A row of such a table is known by all its values: what comes again would be there twice.
CREATE OR REPLACE FUNCTION walbrook.check_repeatable(c walbrook.consumers, target walbrook.place)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    keyless text;
BEGIN
    IF NOT c.repeats_by_key OR target >= ROW(c.cursor_lsn, c.cursor_idx)::walbrook.place THEN
        RETURN;
    END IF;
    SELECT string_agg(DISTINCT v.table_schema || '.' || v.table_name, ', ') INTO keyless
      FROM walbrook.schema_versions v
     WHERE v.source = c.source AND walbrook.takes(c, v.table_schema, v.table_name)
       AND v.replica_identity = 'full' AND cardinality(v.key) = jsonb_array_length(v.columns)
       AND (v.since_lsn, v.since_idx) < (c.cursor_lsn, c.cursor_idx)
       AND NOT EXISTS (SELECT FROM walbrook.schema_versions n
                        WHERE n.source = v.source AND n.relation = v.relation
                          AND n.version > v.version
                          AND (n.since_lsn, n.since_idx) <= (target.lsn, target.idx));
    IF keyless IS NOT NULL THEN
        RAISE EXCEPTION '% would stop at the first change of a table without a key, which cannot be repeated: %', c.name, keyless
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'leave the table out with source.exclude_tables, start the service and '
                         'rewind then; a sink with another name and start_at: earliest delivers it '
                         'from what the log has';
    END IF;
END
$$;

COMMENT ON FUNCTION walbrook.check_repeatable IS 'Refuse a rewind over changes that a mirror cannot apply once more.';

-- Whose messages are numbered (event-time order) gets everything again from its cursor on at the latest.
CREATE OR REPLACE FUNCTION walbrook.rewind(
    consumer text,
    to_cursor text DEFAULT NULL,
    to_time timestamptz DEFAULT NULL,
    to_earliest boolean DEFAULT false,
    destination text DEFAULT NULL
) RETURNS walbrook.consumer_state
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(rewind.consumer);
    stands text := c.cursor_lsn || ':' || c.cursor_idx;
    earliest walbrook.place;
    log_end walbrook.place := walbrook.end_for(c);
    target walbrook.place;
    cut bigint;
    asked jsonb := jsonb_build_object('to_cursor', to_cursor, 'to_time', to_time,
                                      'to_earliest', nullif(to_earliest, false),
                                      'destination', rewind.destination);
BEGIN
    IF num_nonnulls(to_cursor, to_time, nullif(to_earliest, false)) <> 1 THEN
        RAISE EXCEPTION 'it is not clear where % is to go', c.name
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'give one of to_cursor, to_time and to_earliest => true';
    END IF;
    SELECT coalesce(s.earliest_lsn, s.restart_lsn), coalesce(s.earliest_idx, s.restart_idx)
      INTO earliest FROM walbrook.sources s WHERE s.name = c.source;
    target := CASE WHEN to_cursor IS NOT NULL THEN walbrook.parse_cursor(to_cursor)
                   WHEN to_time IS NOT NULL
                   THEN greatest(walbrook.place_at(c.source, to_time), earliest)
                   ELSE earliest END;
    IF target < earliest THEN
        RAISE EXCEPTION 'the change log of % no longer has %:%: it begins at %:%', c.source,
                        target.lsn, target.idx, earliest.lsn, earliest.idx
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'to begin with the first change that it has, say to_earliest => true';
    END IF;
    IF target > log_end THEN
        RAISE EXCEPTION '%:% is beyond the end of the change log of %, which is %:%', target.lsn,
                        target.idx, c.source, log_end.lsn, log_end.idx
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'walbrook.cursors shows where everyone stands';
    END IF;
    -- Behind its cursor some was delivered and some is held back: all of it comes again.
    IF walbrook.is_numbered(c) THEN
        target := least(target, ROW(c.cursor_lsn, c.cursor_idx)::walbrook.place);
    END IF;
    IF target > ROW(c.cursor_lsn, c.cursor_idx)::walbrook.place THEN
        RAISE EXCEPTION '% stands at %, which is before %:%', c.name, stands, target.lsn, target.idx
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'nothing is passed over by a rewind; to give up all that it has not had, '
                         'walbrook.discard_all';
    END IF;
    PERFORM walbrook.check_rewind_way(c, rewind.destination);
    PERFORM walbrook.check_repeatable(c, target);
    -- What a pull consumer has stored above where it stands is about to be settled: if it were taken
    -- out while the cursor stays, that would go past it.
    IF c.destination = 'pull' AND target = ROW(c.cursor_lsn, c.cursor_idx)::walbrook.place THEN
        RETURN walbrook.acted(c.id, 'rewind', 0, asked);
    END IF;
    cut := walbrook.cut_queue(c, target, for_good => false);
    DELETE FROM walbrook.ledger l WHERE l.ledger = c.ledger AND walbrook.is_numbered(c);
    -- What was given up or dropped from there on comes after all.
    DELETE FROM walbrook.gaps g
     WHERE g.source = c.source AND g.consumer = c.name AND g.reason IN ('discarded', 'cap', 'ttl', 'backlog', 'skipped')
       AND (g.from_lsn, g.from_idx) >= (target.lsn, target.idx);
    UPDATE walbrook.gaps g SET to_lsn = target.lsn, to_idx = target.idx
     WHERE g.source = c.source AND g.consumer = c.name AND g.reason IN ('discarded', 'cap', 'ttl', 'backlog', 'skipped')
       AND (g.to_lsn, g.to_idx) > (target.lsn, target.idx);
    UPDATE walbrook.consumers k
       SET cursor_lsn = target.lsn, cursor_idx = target.idx, moved_at = clock_timestamp(),
           backlog_excused = true,
           begun_lsn = CASE WHEN (k.begun_lsn, k.begun_idx) <= (target.lsn, target.idx)
                            THEN k.begun_lsn WHEN k.begun_lsn IS NOT NULL THEN target.lsn END,
           begun_idx = CASE WHEN (k.begun_lsn, k.begun_idx) <= (target.lsn, target.idx)
                            THEN k.begun_idx WHEN k.begun_lsn IS NOT NULL THEN target.idx END,
           generation = k.generation + (rewind.destination = 'new_generation' IS TRUE)::integer,
           truncation = CASE rewind.destination WHEN 'new_generation' THEN 0
                                                WHEN 'truncate' THEN k.truncation + 1
                                                ELSE k.truncation END,
           -- An empty place lacks nothing of what the one before was sent.
           top_lsn = CASE WHEN rewind.destination IS NULL THEN k.top_lsn END,
           top_idx = CASE WHEN rewind.destination IS NULL THEN k.top_idx END,
           lost_at = CASE WHEN rewind.destination IS NULL THEN k.lost_at END,
           -- By it one that stands where it is to start over sees that it is to.
           ledger = CASE WHEN walbrook.is_numbered(c) THEN gen_random_uuid() ELSE k.ledger END
     WHERE k.id = c.id;
    IF rewind.destination IS NOT NULL THEN
        PERFORM walbrook.backfill_again(c);
    END IF;
    RETURN walbrook.acted(c.id, 'rewind', cut, asked);
END
$$;

COMMENT ON FUNCTION walbrook.rewind IS 'Move a consumer''s cursor back, to a cursor, to the start of the log segment that holds a time, or to the first change that the log has: everything from there on is delivered again. A destination that keeps a position of its own needs destination => ''new_generation'' (what it holds stays, a new place beside it begins) or ''truncate'' (what it holds is removed).';

-- For one consumer that cannot have what stands before it, such as a damaged part of the log.
CREATE OR REPLACE FUNCTION walbrook.skip_to(consumer text, to_cursor text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
                      noted_at = excluded.noted_at, reported_at = NULL;
    UPDATE walbrook.consumers k
       SET cursor_lsn = target.lsn, cursor_idx = target.idx, moved_at = clock_timestamp()
     WHERE k.id = c.id;
    RETURN walbrook.acted(c.id, 'skip_to', 0, jsonb_build_object('to_cursor', to_cursor));
END
$$;

COMMENT ON FUNCTION walbrook.skip_to IS 'Move one consumer forward to a cursor and go on without what it lacks before it; a row of walbrook.gaps says from where to where, and its sink is sent a message.';

CREATE OR REPLACE FUNCTION walbrook.note_discarded(
    c walbrook.consumers, from_place walbrook.place, to_place walbrook.place
) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO walbrook.gaps (source, consumer, from_lsn, from_idx, to_lsn, to_idx, reason)
    VALUES (c.source, c.name, from_place.lsn, from_place.idx, to_place.lsn, to_place.idx,
            'discarded')
        ON CONFLICT (source, consumer, from_lsn, from_idx)
        DO UPDATE SET to_lsn = excluded.to_lsn, to_idx = excluded.to_idx, reason = excluded.reason,
                      noted_at = excluded.noted_at, reported_at = NULL
$$;

CREATE OR REPLACE FUNCTION walbrook.discard_all(consumer text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(discard_all.consumer);
    begins walbrook.place := ROW(c.cursor_lsn, c.cursor_idx)::walbrook.place;
    ends walbrook.place := walbrook.end_for(c);
    waits walbrook.place;
    stored walbrook.place;
    cut bigint;
BEGIN
    IF c.destination = 'pull' THEN
        SELECT r.commit_lsn, r.commit_idx INTO waits FROM walbrook.pull_messages r
         WHERE r.consumer = c.id ORDER BY 1, 2 LIMIT 1;
        -- What is stored and not settled goes too: the cursor goes past it, not the settlement.
        SELECT s.commit_lsn, s.commit_idx + 1 INTO stored FROM walbrook.pull_positions s WHERE s.consumer = c.id;
        ends := greatest(ends, stored);
    ELSE
        -- Windows and watermarks have numbers, which are no places in the log.
        SELECT e.commit_lsn, e.commit_idx INTO waits FROM walbrook.events e
         WHERE e.consumer = c.id AND e.action NOT IN ('window', 'watermark') ORDER BY 1, 2 LIMIT 1;
    END IF;
    begins := least(begins, waits);
    IF begins < ends AND ends = stored THEN
        -- The gap's message has the last cursor of the gap: it must be above all that was stored,
        -- or it would be taken for one that is there.
        ends.idx := ends.idx + 1;
    END IF;
    cut := walbrook.cut_queue(c, ROW('0/0', 0)::walbrook.place, for_good => true);
    IF begins < ends THEN
        PERFORM walbrook.note_discarded(c, begins, ends);
        UPDATE walbrook.consumers k
           SET cursor_lsn = ends.lsn, cursor_idx = ends.idx, moved_at = clock_timestamp()
         WHERE k.id = c.id;
    END IF;
    RETURN walbrook.acted(c.id, 'discard_all', cut);
END
$$;

COMMENT ON FUNCTION walbrook.discard_all IS 'Give up all that a consumer has not had: its queue, and the log up to its end; a row of walbrook.gaps says from where to where, and its sink is sent a message.';
