-- Dead letters: sending one again, acknowledging one, giving up a message that waits.

-- Whether a dead letter was a message of this consumer, not of an earlier one of its name.
CREATE OR REPLACE FUNCTION walbrook.is_of(d walbrook.dead_letters, c walbrook.consumers) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT c.destination <> 'pull'
        OR (d.event -> 'message' IS NOT NULL AND (d.event ->> 'consumer')::integer = c.id) IS TRUE
$$;

-- As before, and of an event time that could not be read it says what helps.
CREATE OR REPLACE FUNCTION walbrook.check_redelivery(d walbrook.dead_letters, c walbrook.consumers)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    again text := format('walbrook.rewind(%L, %L%s): everything from there on comes again',
                         walbrook.called(d.source, d.consumer), d.commit_lsn || ':' || d.commit_idx,
                         CASE WHEN cardinality(c.rewind_ways) > 0 AND NOT walbrook.is_numbered(c)
                              THEN format(', destination => %L', c.rewind_ways[1]) ELSE '' END);
BEGIN
    IF d.event IS NULL THEN
        RAISE EXCEPTION 'dead letter % of % never was a message (%)', d.id, d.consumer, d.kind
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = CASE d.kind
                      WHEN 'decode' THEN 'correct the row in the source: the correction arrives as '
                                         'a change of its own'
                      WHEN 'event_time' THEN 'correct the row in the source, where the correction '
                                             'arrives as a change of its own; or correct event_time '
                                             'of the sink, start the service, and ' || again
                      WHEN 'expression' THEN 'correct the expression, start the service, and ' || again
                      ELSE again END
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
    IF c.destination = 'kafka' THEN
        RAISE EXCEPTION '% would not take dead letter % again: its destination (%) has no queue of '
                        'messages that wait', d.consumer, d.id, c.destination
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('%s; then walbrook.discard(%s)', again, d.id);
    END IF;
END
$$;

-- Put dead letters back into the queue, before whatever of their groups waits there.
CREATE OR REPLACE FUNCTION walbrook.put_back(c walbrook.consumers, letters bigint[]) RETURNS bigint
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

-- As before, and named either way.
CREATE OR REPLACE FUNCTION walbrook.find_dead_letter(number bigint, consumer text)
RETURNS walbrook.dead_letters
LANGUAGE plpgsql AS $$
DECLARE
    d walbrook.dead_letters;
BEGIN
    SELECT * INTO d FROM walbrook.dead_letters k WHERE k.id = number;
    IF d.id IS NULL
       OR find_dead_letter.consumer NOT IN (d.consumer, d.source || '/' || d.consumer) THEN
        RAISE EXCEPTION 'there is no dead letter %', number
                        || coalesce(' of ' || find_dead_letter.consumer, '')
            USING ERRCODE = 'no_data_found',
                  HINT = 'walbrook.dead_letters lists them by their id; one that was sent again or '
                         'discarded is there no more';
    END IF;
    RETURN d;
END
$$;

-- As before; it knows its database, so nothing is ambiguous.
CREATE OR REPLACE FUNCTION walbrook.redeliver(dead_letter bigint, consumer text DEFAULT NULL)
RETURNS walbrook.consumer_state
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
    c := walbrook.find_consumer(d.source || '/' || d.consumer);
    PERFORM walbrook.check_redelivery(d, c);
    RETURN walbrook.acted(c.id, 'redeliver', walbrook.put_back(c, ARRAY[d.id]),
                          jsonb_build_object('dead_letter', d.id));
END
$$;

CREATE OR REPLACE FUNCTION walbrook.redeliver(consumer text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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

COMMENT ON FUNCTION walbrook.redeliver(bigint, text) IS 'Put a dead letter back into its consumer''s queue, due at once.';

COMMENT ON FUNCTION walbrook.redeliver(text) IS 'The same with all dead letters of a consumer that can be sent again.';

CREATE OR REPLACE FUNCTION walbrook.discard(dead_letter bigint, consumer text DEFAULT NULL)
RETURNS walbrook.consumer_state
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    d walbrook.dead_letters := walbrook.find_dead_letter(dead_letter, discard.consumer);
    answer walbrook.consumer_state;
BEGIN
    DELETE FROM walbrook.dead_letters k WHERE k.id = d.id;
    SELECT a.* INTO answer FROM walbrook.consumers c, walbrook.acted(
           c.id, 'discard', 1, jsonb_build_object('dead_letter', d.id)) a
     WHERE c.source = d.source AND c.name = d.consumer;
    IF answer.consumer IS NULL THEN  -- one that is no more
        answer.source := d.source;
        answer.consumer := d.consumer;
        answer.affected := 1;
        PERFORM walbrook.note_act('discard', jsonb_build_object(
            'source', d.source, 'consumer', d.consumer, 'dead_letter', d.id));
    END IF;
    RETURN answer;
END
$$;

CREATE OR REPLACE FUNCTION walbrook.discard(consumer text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c walbrook.consumers := walbrook.find_consumer(discard.consumer);
    deleted bigint;
BEGIN
    DELETE FROM walbrook.dead_letters d WHERE d.source = c.source AND d.consumer = c.name;
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN walbrook.acted(c.id, 'discard', deleted);
END
$$;

CREATE OR REPLACE FUNCTION walbrook.discard(consumer text, at_cursor text) RETURNS walbrook.consumer_state
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
                                CASE c.destination WHEN 'pull' THEN 'pull_messages' ELSE 'events' END,
                                c.id);
    END IF;
    PERFORM walbrook.note_discarded(c, place, ROW(place.lsn, place.idx + 1)::walbrook.place);
    IF c.destination = 'pull' THEN  -- where the message was, it says so
        UPDATE walbrook.gaps g SET reported_at = clock_timestamp()
         WHERE g.source = c.source AND g.consumer = c.name
           AND g.from_lsn = place.lsn AND g.from_idx = place.idx;
    ELSE
        PERFORM walbrook.promote(c.id, CASE WHEN NOT gone.whole_table THEN ARRAY[gone.group_id] END);
    END IF;
    RETURN walbrook.acted(c.id, 'discard', 1, jsonb_build_object('at_cursor', at_cursor));
END
$$;

COMMENT ON FUNCTION walbrook.discard(bigint, text) IS 'Acknowledge a dead letter: its row is deleted.';

COMMENT ON FUNCTION walbrook.discard(text) IS 'Acknowledge all dead letters of a consumer.';

COMMENT ON FUNCTION walbrook.discard(text, text) IS 'Give up one message that waits in a consumer''s queue: a row of walbrook.gaps says so, its sink is sent a message, and its group goes on.';

-- Of a pull consumer: the gap message takes the message's place, at once due and of no group.
CREATE OR REPLACE FUNCTION walbrook.discard_record(c walbrook.consumers, place walbrook.place)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    r record;
BEGIN
    -- First what an acknowledgement locks first.
    PERFORM FROM walbrook.pull_in_flight f
     WHERE f.consumer = c.id AND f.commit_lsn = place.lsn AND f.commit_idx = place.idx FOR UPDATE;
    SELECT * INTO r FROM walbrook.pull_messages k
     WHERE k.consumer = c.id AND k.commit_lsn = place.lsn AND k.commit_idx = place.idx
       AND k.action <> 'gap' FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE walbrook.pull_messages k
       SET action = 'gap', group_id = NULL, whole_table = false, table_schema = '', table_name = '',
           bytes = length(p.gap_message),
           message = walbrook.gap_message(
               p.gap_message, place.lsn, place.idx, place.lsn || ':' || place.idx,
               place.lsn || ':' || place.idx + 1, 'discarded')
      FROM walbrook.pull_settings p
     WHERE p.consumer = c.id AND k.consumer = c.id
       AND k.commit_lsn = place.lsn AND k.commit_idx = place.idx;
    UPDATE walbrook.pull_in_flight f
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
