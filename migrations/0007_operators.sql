-- What an operator does, as functions. Each refuses what it cannot do and says why, answers with the
-- consumer's new state, and tells the running service at once (channel walbrook).
--
-- All of them lock the consumer's row before they touch its queue, as the service does; where it is a
-- pull consumer, before that what its claims lock, in their order.

CREATE TYPE walbrook.consumer_state AS (
    source       text,
    consumer     text,
    "cursor"     text,
    paused_at    timestamptz,
    waiting      bigint,
    dead_letters bigint,
    affected     bigint,
    state        text,
    state_reason text,
    generation   integer
);

COMMENT ON TYPE walbrook.consumer_state IS 'A consumer after an operator''s act: its cursor, how many messages wait in its queue, how many dead letters it has (10000 stands for 10000 or more), and how many messages the act moved or gave up.';

CREATE TYPE walbrook.place AS (lsn pg_lsn, idx bigint);

-- Gaps that a sink has still to be told of are looked for each second.
CREATE INDEX gaps_untold ON walbrook.gaps (source, consumer) WHERE told_at IS NULL;

CREATE FUNCTION walbrook.find_consumer(named text) RETURNS walbrook.consumers
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers;
    sources text[];
    others text;
BEGIN
    SELECT array_agg(k.source ORDER BY k.source) INTO sources
      FROM walbrook.consumers k WHERE k.name = named AND k.active;
    IF cardinality(sources) > 1 THEN
        RAISE EXCEPTION 'consumer % is ambiguous: the sources % have one each', named,
                        array_to_string(sources, ', ')
            USING ERRCODE = 'too_many_rows',
                  HINT = 'give one of them another name in its configuration';
    END IF;
    SELECT * INTO c FROM walbrook.consumers k WHERE k.name = named AND k.active;
    IF c.destination = 'pull' THEN
        PERFORM FROM walbrook.stored s WHERE s.consumer = c.id FOR UPDATE;
        PERFORM FROM walbrook.pulls p WHERE p.consumer = c.id FOR UPDATE;
    END IF;
    -- Not FOR UPDATE: rows that refer to it may be added meanwhile.
    SELECT * INTO c FROM walbrook.consumers k
     WHERE k.id = c.id AND k.active FOR NO KEY UPDATE;
    IF c.name IS NOT NULL THEN
        RETURN c;
    END IF;
    SELECT string_agg(few.name, ', ' ORDER BY few.name) INTO others
      FROM (SELECT k.name FROM walbrook.consumers k WHERE k.active ORDER BY 1 LIMIT 20) few;
    IF EXISTS (SELECT FROM walbrook.consumers k WHERE k.name = named) THEN
        RAISE EXCEPTION 'consumer % is not active: the configuration does not name it', named
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'add it to the configuration again and start the service; active ones: '
                         || coalesce(others, 'none');
    END IF;
    RAISE EXCEPTION 'there is no consumer %', coalesce(named, 'without a name')
        USING ERRCODE = 'WB001', HINT = 'there are: ' || coalesce(others, 'none yet');
END
$$;

COMMENT ON FUNCTION walbrook.find_consumer IS 'The one active consumer of that name, its row locked.';

CREATE FUNCTION walbrook.is_paused(consumer_id integer) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM walbrook.consumers c
                    WHERE c.id = consumer_id AND c.paused_at IS NOT NULL)
$$;

COMMENT ON FUNCTION walbrook.is_paused IS 'Whether an operator holds this consumer (walbrook.consumers.id) back.';

CREATE FUNCTION walbrook.parse_cursor(written text) RETURNS walbrook.place
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF written !~* '^[0-9a-f]{1,8}/[0-9a-f]{1,8}:[0-9]{1,18}$' THEN
        RAISE EXCEPTION '''%'' is not a cursor', written
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'write it as LSN:index, such as 16/B374D848:3';
    END IF;
    RETURN ROW(split_part(written, ':', 1), split_part(written, ':', 2))::walbrook.place;
END
$$;

-- What is below the end of every destination of these kinds is taken for a repeat.
CREATE FUNCTION walbrook.keeps_position(destination text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT destination IN ('file', 'parquet', 'postgres', 'redis_stream', 'kafka_exactly_once')
$$;

-- Not more than these are counted: whoever counts holds locks that settling waits for.
CREATE FUNCTION walbrook.counted_max() RETURNS integer
LANGUAGE sql IMMUTABLE AS $$ SELECT 10000 $$;

CREATE FUNCTION walbrook.waiting(c walbrook.consumers) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    IF c.destination = 'pull' THEN
        RETURN (SELECT count(*) FROM (SELECT FROM walbrook.records r WHERE r.consumer = c.id
                                       LIMIT walbrook.counted_max()) few);
    END IF;
    RETURN (SELECT count(*) FROM (SELECT FROM walbrook.events e WHERE e.consumer = c.id
                                   LIMIT walbrook.counted_max()) few);
END
$$;

COMMENT ON FUNCTION walbrook.waiting IS 'How many messages are in a consumer''s queue; 10000 stands for 10000 or more.';

CREATE FUNCTION walbrook.acted(id integer, action text, affected bigint)
RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    answer walbrook.consumer_state;
BEGIN
    SELECT c.source, c.name, c.cursor_lsn || ':' || c.cursor_idx, c.paused_at,
           walbrook.waiting(c),
           (SELECT count(*) FROM (SELECT FROM walbrook.dead_letters d
                                   WHERE d.source = c.source AND d.consumer = c.name
                                   LIMIT walbrook.counted_max()) few),
           acted.affected, c.state, c.state_reason, c.generation
      INTO answer FROM walbrook.consumers c WHERE c.id = acted.id;
    PERFORM walbrook.announce(answer.source, answer.consumer, acted.action);
    PERFORM pg_notify('walbrook_pull', acted.id::text);  -- who waits for messages looks again
    RETURN answer;
END
$$;

COMMENT ON FUNCTION walbrook.acted IS 'Announce what an operator did to a consumer. Returns its new state.';

CREATE FUNCTION walbrook.announce(source text, consumer text, action text) RETURNS void
LANGUAGE sql AS $$
    SELECT pg_notify('walbrook', json_build_object(
        'source', announce.source, 'consumer', announce.consumer, 'action', announce.action)::text)
$$;

COMMENT ON FUNCTION walbrook.announce IS 'Tell the running service what an operator did to a consumer (channel walbrook).';

CREATE FUNCTION walbrook.is_head(e walbrook.events) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN NOT EXISTS (
               SELECT FROM walbrook.events b
                WHERE b.consumer = e.consumer AND b.group_id = e.group_id
                  AND (b.commit_lsn, b.commit_idx) < (e.commit_lsn, e.commit_idx))
       AND NOT EXISTS (
               SELECT FROM walbrook.events b
                WHERE b.consumer = e.consumer AND b.whole_table
                  AND b.table_schema = e.table_schema AND b.table_name = e.table_name
                  AND (b.commit_lsn, b.commit_idx) < (e.commit_lsn, e.commit_idx))
       AND NOT (e.whole_table AND EXISTS (
               SELECT FROM walbrook.events b
                WHERE b.consumer = e.consumer
                  AND b.table_schema = e.table_schema AND b.table_name = e.table_name
                  AND (b.commit_lsn, b.commit_idx) < (e.commit_lsn, e.commit_idx)));
END
$$;

COMMENT ON FUNCTION walbrook.is_head IS 'Whether a message of a queue waits for no earlier one: of its group, or of its table where one of the two has its place there.';

CREATE FUNCTION walbrook.pause(consumer text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(pause.consumer);
BEGIN
    UPDATE walbrook.consumers k SET paused_at = coalesce(k.paused_at, clock_timestamp())
     WHERE k.id = c.id;
    RETURN walbrook.acted(c.id, 'pause', 0);
END
$$;

COMMENT ON FUNCTION walbrook.pause IS 'Deliver nothing more to a consumer, from the end of what is under way on; it keeps its cursor.';

CREATE FUNCTION walbrook.resume(consumer text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(resume.consumer);
BEGIN
    UPDATE walbrook.consumers k
       SET paused_at = NULL, disabled_at = NULL, disabled_reason = NULL,
           backlog_excused = k.backlog_excused OR k.disabled_at IS NOT NULL,
           -- That it was paused is no reason any more; whoever serves it says the next one.
           state_reason = CASE WHEN k.paused_at IS NULL THEN k.state_reason END,
           state = CASE WHEN k.paused_at IS NULL THEN k.state END
     WHERE k.id = c.id;
    RETURN walbrook.acted(c.id, 'resume', 0);
END
$$;

COMMENT ON FUNCTION walbrook.resume IS 'Serve a paused consumer again, from its cursor on.';

CREATE FUNCTION walbrook.accept_loss(consumer text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(accept_loss.consumer);
BEGIN
    UPDATE walbrook.consumers k SET lost_at = NULL, top_lsn = NULL, top_idx = NULL
     WHERE k.id = c.id;
    RETURN walbrook.acted(c.id, 'accept_loss', 0);
END
$$;

COMMENT ON FUNCTION walbrook.accept_loss IS 'Take note that the destination of a consumer lost messages that it had; ends destination_lost_data in walbrook.health.';

-- The end of the log as its reader last told, or the consumer itself if that is further.
CREATE FUNCTION walbrook.end_for(c walbrook.consumers) RETURNS walbrook.place
LANGUAGE sql STABLE AS $$
    SELECT greatest(ROW(coalesce(s.log_lsn, '0/0'), coalesce(s.log_idx, 0))::walbrook.place,
                    ROW(c.cursor_lsn, c.cursor_idx)::walbrook.place)
      FROM walbrook.sources s WHERE s.name = c.source
$$;

-- Remove what waits at or above a place, to come again or for good; says how many messages that was.
CREATE FUNCTION walbrook.cut_queue(c walbrook.consumers, target walbrook.place, for_good boolean)
RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    cut bigint;
BEGIN
    IF c.destination = 'pull' THEN
        RETURN walbrook.forget_records(c.id, target.lsn, target.idx, for_good);
    END IF;
    DELETE FROM walbrook.events e
     WHERE e.consumer = c.id AND (e.commit_lsn, e.commit_idx) >= (target.lsn, target.idx);
    GET DIAGNOSTICS cut = ROW_COUNT;
    RETURN cut;
END
$$;

-- A place in the log by the time of commit: the start of the segment that holds it.
CREATE FUNCTION walbrook.place_at(source text, at timestamptz) RETURNS walbrook.place
LANGUAGE plpgsql AS $$
DECLARE
    begins timestamptz;
    ends timestamptz;
    place walbrook.place;
BEGIN
    SELECT min(g.commit_from), max(g.commit_to) INTO begins, ends
      FROM walbrook.log_segments g WHERE g.source = place_at.source;
    IF begins IS NULL OR at < begins THEN
        RAISE EXCEPTION 'the change log of % holds nothing from before %', place_at.source,
                        coalesce(begins::text, 'now')
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'to begin with the first change that it has, say to_earliest => true';
    END IF;
    IF at > ends THEN
        RAISE EXCEPTION 'the change log of % ends with a change of %, before %', place_at.source,
                        ends, at
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'nothing was committed since; give an earlier time';
    END IF;
    SELECT g.first_lsn, g.first_idx INTO place
      FROM walbrook.log_segments g
     WHERE g.source = place_at.source AND g.commit_to >= at
     ORDER BY g.first_batch LIMIT 1;
    RETURN place;
END
$$;

-- In event-time order what comes again has a number that its destination has not seen, so it needs
-- no empty place.
CREATE FUNCTION walbrook.check_rewind_way(c walbrook.consumers, way text) RETURNS void
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

-- Whose messages are numbered (event-time order) gets everything again from its cursor on at the latest.
CREATE FUNCTION walbrook.rewind(
    consumer text,
    to_cursor text DEFAULT NULL,
    to_time timestamptz DEFAULT NULL,
    to_earliest boolean DEFAULT false,
    destination text DEFAULT NULL
) RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(rewind.consumer);
    stands text := c.cursor_lsn || ':' || c.cursor_idx;
    earliest walbrook.place;
    log_end walbrook.place := walbrook.end_for(c);
    target walbrook.place;
    cut bigint;
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
    -- What a pull consumer has stored above where it stands is about to be settled: if it were taken
    -- out while the cursor stays, that would go past it.
    IF c.destination = 'pull' AND target = ROW(c.cursor_lsn, c.cursor_idx)::walbrook.place THEN
        RETURN walbrook.acted(c.id, 'rewind', 0);
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
           generation = k.generation + (rewind.destination = 'new_generation' IS TRUE)::integer,
           truncation = CASE rewind.destination WHEN 'new_generation' THEN 0
                                                WHEN 'truncate' THEN k.truncation + 1
                                                ELSE k.truncation END,
           -- An empty place lacks nothing of what the one before was sent.
           top_lsn = CASE WHEN rewind.destination IS NULL THEN k.top_lsn END,
           top_idx = CASE WHEN rewind.destination IS NULL THEN k.top_idx END,
           lost_at = CASE WHEN rewind.destination IS NULL THEN k.lost_at END,
           -- By it one that stands where it is to begin anew sees that it is to.
           ledger = CASE WHEN walbrook.is_numbered(c) THEN gen_random_uuid() ELSE k.ledger END
     WHERE k.id = c.id;
    RETURN walbrook.acted(c.id, 'rewind', cut);
END
$$;

COMMENT ON FUNCTION walbrook.rewind IS 'Move a consumer''s cursor back, to a cursor, to the start of the log segment that holds a time, or to the first change that the log has: everything from there on is delivered again. A destination that keeps a position of its own needs destination => ''new_generation'' (what it holds stays, a new place beside it begins) or ''truncate'' (what it holds is removed).';

CREATE FUNCTION walbrook.note_discarded(
    c walbrook.consumers, from_place walbrook.place, to_place walbrook.place
) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO walbrook.gaps (source, consumer, from_lsn, from_idx, to_lsn, to_idx, reason)
    VALUES (c.source, c.name, from_place.lsn, from_place.idx, to_place.lsn, to_place.idx,
            'discarded')
        ON CONFLICT (source, consumer, from_lsn, from_idx)
        DO UPDATE SET to_lsn = excluded.to_lsn, to_idx = excluded.to_idx, reason = excluded.reason,
                      noted_at = excluded.noted_at, told_at = NULL
$$;

CREATE FUNCTION walbrook.discard_all(consumer text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(discard_all.consumer);
    begins walbrook.place := ROW(c.cursor_lsn, c.cursor_idx)::walbrook.place;
    ends walbrook.place := walbrook.end_for(c);
    waits walbrook.place;
    stored walbrook.place;
    cut bigint;
BEGIN
    IF c.destination = 'pull' THEN
        SELECT r.commit_lsn, r.commit_idx INTO waits FROM walbrook.records r
         WHERE r.consumer = c.id ORDER BY 1, 2 LIMIT 1;
        -- What is stored and not settled goes too: the cursor goes past it, not the settlement.
        SELECT s.commit_lsn, s.commit_idx + 1 INTO stored FROM walbrook.stored s WHERE s.consumer = c.id;
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

COMMENT ON FUNCTION walbrook.discard_all IS 'Give up all that a consumer has not had: its queue, and the log up to its end; a row of walbrook.gaps says from where to where, and its sink is told.';

-- Whether a dead letter was a message of this consumer, not of an earlier one of its name.
CREATE FUNCTION walbrook.is_of(d walbrook.dead_letters, c walbrook.consumers) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT c.destination <> 'pull'
        OR (d.event -> 'message' IS NOT NULL AND (d.event ->> 'consumer')::integer = c.id) IS TRUE
$$;

-- Whether a dead letter can be sent again; if not, why, and what to do instead.
CREATE FUNCTION walbrook.check_redelivery(d walbrook.dead_letters, c walbrook.consumers)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    place text := d.commit_lsn || ':' || d.commit_idx;
BEGIN
    IF d.event IS NULL THEN
        RAISE EXCEPTION 'dead letter % of % never was a message: %', d.id, d.consumer, d.error
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = CASE d.kind
                      WHEN 'decode' THEN 'correct the row in the source: the correction arrives as '
                                         'a change of its own'
                      WHEN 'expression' THEN format('correct the expression, start the service, and '
                          'walbrook.rewind(%L, %L): everything from there on comes again',
                          d.consumer, place)
                      ELSE format('walbrook.rewind(%L, %L): everything from there on comes again',
                                  d.consumer, place) END
                      || format('; then walbrook.discard(%s)', d.id);
    END IF;
    IF NOT walbrook.is_of(d, c) THEN
        RAISE EXCEPTION 'dead letter % is of an earlier consumer % than there is now', d.id, c.name
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('take what you need of it from the column event, then '
                                'walbrook.discard(%s)', d.id);
    END IF;
    IF walbrook.keeps_position(c.destination) THEN
        RAISE EXCEPTION '% would not take dead letter % again: its destination (%) holds messages '
                        'in the order of their cursors and takes this one for a repeat',
                        d.consumer, d.id, c.destination
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('bring the destination up to date from the column event, then '
                                'walbrook.discard(%s)', d.id);
    END IF;
END
$$;

-- Put dead letters back into the queue, before whatever of their groups waits there.
CREATE FUNCTION walbrook.put_back(c walbrook.consumers, letters bigint[]) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    put bigint;
    lsns pg_lsn[];
    idxs bigint[];
BEGIN
    IF c.destination = 'pull' THEN
        -- One that is there already stays as it is.
        WITH letters AS (
            DELETE FROM walbrook.dead_letters d WHERE d.id = ANY (put_back.letters)
            RETURNING d.event)
        SELECT count(*) FILTER (WHERE walbrook.requeue_record(letters.event)) INTO put FROM letters;
        RETURN put;
    END IF;
    WITH letters AS (
        DELETE FROM walbrook.dead_letters d WHERE d.id = ANY (put_back.letters) RETURNING d.event),
    back AS (
        INSERT INTO walbrook.events AS q
        SELECT e.*
          FROM letters, LATERAL jsonb_populate_record(NULL::walbrook.events,
               letters.event::jsonb || jsonb_build_object(
                   'consumer', c.id, 'due_at', NULL, 'deliveries', 0, 'abandoned', 0,
                   'error', NULL, 'error_kind', NULL, 'tried_at', NULL, 'queued_at', clock_timestamp(),
                   'lease_id', NULL, 'holder', NULL, 'lease_until', NULL)) e
            ON CONFLICT (consumer, commit_lsn, commit_idx)
            DO UPDATE SET due_at = NULL, deliveries = 0, abandoned = 0
        RETURNING q.group_id, q.whole_table, q.table_schema, q.table_name,
                  q.commit_lsn, q.commit_idx),
    behind AS (
        UPDATE walbrook.events e SET due_at = NULL FROM back b
         WHERE e.consumer = c.id AND e.due_at IS NOT NULL AND e.lease_id IS NULL
           AND (e.commit_lsn, e.commit_idx) > (b.commit_lsn, b.commit_idx)
           AND (e.group_id = b.group_id
                OR (e.whole_table OR b.whole_table)
                   AND (e.table_schema, e.table_name) = (b.table_schema, b.table_name)))
    SELECT count(*), array_agg(commit_lsn), array_agg(commit_idx) INTO put, lsns, idxs FROM back;
    UPDATE walbrook.events e SET due_at = clock_timestamp()
      FROM unnest(lsns, idxs) u (lsn, idx)
     WHERE e.consumer = c.id AND e.commit_lsn = u.lsn AND e.commit_idx = u.idx
       AND e.due_at IS NULL AND walbrook.is_head(e);
    RETURN put;
END
$$;

CREATE FUNCTION walbrook.find_dead_letter(number bigint, consumer text)
RETURNS walbrook.dead_letters
LANGUAGE plpgsql AS $$
DECLARE
    d walbrook.dead_letters;
BEGIN
    SELECT * INTO d FROM walbrook.dead_letters k WHERE k.id = number;
    IF d.id IS NULL OR d.consumer <> find_dead_letter.consumer THEN
        RAISE EXCEPTION 'there is no dead letter %', number
                        || coalesce(' of ' || find_dead_letter.consumer, '')
            USING ERRCODE = 'no_data_found',
                  HINT = 'walbrook.dead_letters lists them by their id; one that was sent again or '
                         'discarded is there no more';
    END IF;
    RETURN d;
END
$$;

CREATE FUNCTION walbrook.redeliver(dead_letter bigint, consumer text DEFAULT NULL)
RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    d walbrook.dead_letters := walbrook.find_dead_letter(dead_letter, redeliver.consumer);
    c walbrook.consumers;
BEGIN
    IF NOT EXISTS (SELECT FROM walbrook.consumers k
                    WHERE k.source = d.source AND k.name = d.consumer AND k.active) THEN
        RAISE EXCEPTION 'dead letter % has nowhere to go: there is no consumer % any more', d.id,
                        d.consumer
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('add it to the configuration again and start the service, or '
                                'walbrook.discard(%s)', d.id);
    END IF;
    c := walbrook.find_consumer(d.consumer);
    PERFORM walbrook.check_redelivery(d, c);
    RETURN walbrook.acted(c.id, 'redeliver', walbrook.put_back(c, ARRAY[d.id]));
END
$$;

COMMENT ON FUNCTION walbrook.redeliver(bigint, text) IS 'Put a dead letter back into its consumer''s queue, due at once.';

CREATE FUNCTION walbrook.redeliver(consumer text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(redeliver.consumer);
    d walbrook.dead_letters;
    letters bigint[];
    left_over bigint;
    earlier bigint;
BEGIN
    SELECT array_agg(k.id) FILTER (WHERE k.event IS NOT NULL AND walbrook.is_of(k, c)),
           count(*) FILTER (WHERE k.event IS NULL),
           count(*) FILTER (WHERE k.event IS NOT NULL AND NOT walbrook.is_of(k, c))
      INTO letters, left_over, earlier
      FROM walbrook.dead_letters k WHERE k.source = c.source AND k.consumer = c.name;
    SELECT * INTO d FROM walbrook.dead_letters k
     WHERE k.source = c.source AND k.consumer = c.name
     ORDER BY k.id <> ALL (coalesce(letters, ARRAY[]::bigint[])), k.commit_lsn, k.commit_idx LIMIT 1;
    IF d.id IS NOT NULL THEN
        PERFORM walbrook.check_redelivery(d, c);  -- the first of those that can be speaks for them
    END IF;
    IF left_over > 0 THEN
        RAISE WARNING '% dead letters of % never were messages and stay', left_over, c.name
            USING HINT = 'walbrook.redeliver of one of them by its id says what to do instead';
    END IF;
    IF earlier > 0 THEN
        RAISE WARNING '% dead letters are of an earlier consumer % than there is now and stay',
                      earlier, c.name
            USING HINT = 'walbrook.redeliver of one of them by its id says what to do instead';
    END IF;
    RETURN walbrook.acted(c.id, 'redeliver',
                          walbrook.put_back(c, coalesce(letters, ARRAY[]::bigint[])));
END
$$;

COMMENT ON FUNCTION walbrook.redeliver(text) IS 'The same with all dead letters of a consumer that can be sent again.';

CREATE FUNCTION walbrook.discard(dead_letter bigint, consumer text DEFAULT NULL)
RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    d walbrook.dead_letters := walbrook.find_dead_letter(dead_letter, discard.consumer);
    answer walbrook.consumer_state;
BEGIN
    DELETE FROM walbrook.dead_letters k WHERE k.id = d.id;
    SELECT a.* INTO answer FROM walbrook.consumers c, walbrook.acted(c.id, 'discard', 1) a
     WHERE c.source = d.source AND c.name = d.consumer;
    IF answer.consumer IS NULL THEN  -- one that is no more
        answer.source := d.source;
        answer.consumer := d.consumer;
        answer.affected := 1;
    END IF;
    RETURN answer;
END
$$;

COMMENT ON FUNCTION walbrook.discard(bigint, text) IS 'Acknowledge a dead letter: its row is deleted.';

CREATE FUNCTION walbrook.discard(consumer text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(discard.consumer);
    deleted bigint;
BEGIN
    DELETE FROM walbrook.dead_letters d WHERE d.source = c.source AND d.consumer = c.name;
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN walbrook.acted(c.id, 'discard', deleted);
END
$$;

COMMENT ON FUNCTION walbrook.discard(text) IS 'Acknowledge all dead letters of a consumer.';

-- Of a pull consumer: the gap message takes the message's place, at once due and of no group.
CREATE FUNCTION walbrook.discard_record(c walbrook.consumers, place walbrook.place)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    r record;
BEGIN
    -- First what an acknowledgement locks first.
    PERFORM FROM walbrook.in_flight f
     WHERE f.consumer = c.id AND f.commit_lsn = place.lsn AND f.commit_idx = place.idx FOR UPDATE;
    SELECT * INTO r FROM walbrook.records k
     WHERE k.consumer = c.id AND k.commit_lsn = place.lsn AND k.commit_idx = place.idx
       AND k.action <> 'gap' FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE walbrook.records k
       SET action = 'gap', group_id = NULL, whole_table = false, table_schema = '', table_name = '',
           bytes = length(p.gap_message),
           message = walbrook.gap_message(
               p.gap_message, place.lsn, place.idx, place.lsn || ':' || place.idx,
               place.lsn || ':' || place.idx + 1, 'discarded')
      FROM walbrook.pulls p
     WHERE p.consumer = c.id AND k.consumer = c.id
       AND k.commit_lsn = place.lsn AND k.commit_idx = place.idx;
    UPDATE walbrook.in_flight f
       SET group_id = NULL, whole_table = false, table_schema = '', table_name = '',
           lease_id = NULL, lease_until = NULL, holder = NULL, error = NULL, deliveries = 0,
           due_at = clock_timestamp()
     WHERE f.consumer = c.id AND f.commit_lsn = place.lsn AND f.commit_idx = place.idx;
    IF FOUND THEN
        PERFORM walbrook.wake_waiting(c.id, ARRAY[r.group_id], ARRAY[r.table_schema],
                                      ARRAY[r.table_name], ARRAY[r.whole_table], in_claim => true);
    END IF;
    RETURN true;
END
$$;

CREATE FUNCTION walbrook.discard(consumer text, at_cursor text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(discard.consumer);
    place walbrook.place := walbrook.parse_cursor(at_cursor);
    was_there boolean;
    gone walbrook.events;
BEGIN
    IF c.destination = 'pull' THEN
        was_there := walbrook.discard_record(c, place);
    ELSE
        DELETE FROM walbrook.events e
         WHERE e.consumer = c.id AND e.commit_lsn = place.lsn AND e.commit_idx = place.idx
        RETURNING e.* INTO gone;
        was_there := FOUND;
    END IF;
    IF NOT was_there THEN
        RAISE EXCEPTION 'no message of % waits at %', c.name, at_cursor
            USING ERRCODE = 'no_data_found',
                  HINT = format('those that wait: SELECT commit_lsn, commit_idx, action FROM '
                                'walbrook.%s WHERE consumer = %s',
                                CASE c.destination WHEN 'pull' THEN 'records' ELSE 'events' END,
                                c.id);
    END IF;
    PERFORM walbrook.note_discarded(c, place, ROW(place.lsn, place.idx + 1)::walbrook.place);
    IF c.destination = 'pull' THEN  -- where the message was, it says so
        UPDATE walbrook.gaps g SET told_at = clock_timestamp()
         WHERE g.source = c.source AND g.consumer = c.name
           AND g.from_lsn = place.lsn AND g.from_idx = place.idx;
    ELSE
        PERFORM walbrook.promote(c.id, CASE WHEN NOT gone.whole_table THEN ARRAY[gone.group_id] END);
    END IF;
    RETURN walbrook.acted(c.id, 'discard', 1);
END
$$;

COMMENT ON FUNCTION walbrook.discard(text, text) IS 'Give up one message that waits in a consumer''s queue: a row of walbrook.gaps says so, its sink is told, and its group goes on.';
