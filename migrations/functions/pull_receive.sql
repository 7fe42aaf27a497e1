-- Pull consumers: receiving messages, for one claimer or for many in one pass.

CREATE OR REPLACE FUNCTION walbrook.receive(consumer text, batch_size integer DEFAULT 1,
                                            visibility interval DEFAULT NULL, wait interval DEFAULT '0',
                                            holder text DEFAULT NULL)
RETURNS SETOF walbrook.received
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    settings walbrook.pull_settings;
    ends     timestamptz;
    is_last  boolean;
    stood    record;
    stands   record;
    pause_s  float8 := 0.05;
BEGIN
    PERFORM walbrook.check_receive(batch_size, visibility);
    PERFORM walbrook.check_interval('wait', coalesce(wait, '0'), 0, 60);
    ends := clock_timestamp() + coalesce(wait, '0');
    LOOP
        -- Each time: it may be paused meanwhile.
        settings := walbrook.pull_consumer(receive.consumer, to_receive => true);
        is_last := clock_timestamp() >= ends;
        IF walbrook.claimable(settings.consumer) THEN
            IF is_last THEN
                RETURN QUERY SELECT * FROM walbrook.claim(settings.consumer, batch_size, visibility, left(holder, 200));
                RETURN;
            END IF;
            SELECT c.commit_lsn, c.commit_idx INTO stood FROM walbrook.pull_claims c
             WHERE c.consumer = settings.consumer ORDER BY c.lease_id DESC LIMIT 1;
            -- Nothing may be locked while it waits: what a claim without an outcome has done is undone.
            -- Unless it passed messages over: then others, behind those, can be reached from there, and
            -- the caller asks again.
            BEGIN
                RETURN QUERY SELECT * FROM walbrook.claim(settings.consumer, batch_size, visibility, left(holder, 200));
                IF FOUND THEN
                    RETURN;
                END IF;
                SELECT c.commit_lsn, c.commit_idx INTO stands FROM walbrook.pull_claims c
                 WHERE c.consumer = settings.consumer ORDER BY c.lease_id DESC LIMIT 1;
                IF (stands.commit_lsn, stands.commit_idx)
                   > (coalesce(stood.commit_lsn, '0/0'), coalesce(stood.commit_idx, -1)) THEN
                    RETURN;
                END IF;
                RAISE EXCEPTION USING ERRCODE = 'WB000';
            EXCEPTION WHEN SQLSTATE 'WB000' THEN
                -- Messages wait, and max_in_flight are handed out. A claim counts those: the pause
                -- before the next claim doubles, up to a second.
                pause_s := least(pause_s * 2, 1);
            END;
        ELSE
            pause_s := 0.05;
        END IF;
        EXIT WHEN is_last;
        PERFORM pg_sleep(least(pause_s, greatest(extract(epoch FROM ends - clock_timestamp())::float8, 0.001)));
    END LOOP;
END
$$;

COMMENT ON FUNCTION walbrook.receive IS 'Fetch up to batch_size messages of a pull consumer. They are the caller''s for visibility; walbrook.ack says that they are done. With wait, it waits so long for a first one; it may come back earlier without any, to be asked again.';

-- Many claimers at once, first come first: one pass, of which everyone has an equal share, until about
-- 64 MiB were handed out.
CREATE OR REPLACE FUNCTION walbrook.receive_shared(consumer text, batch_sizes integer[], visibilities interval[],
                                                   holders text[])
RETURNS TABLE (claimer integer, ack_id text, deliveries integer, lease_until timestamptz,
               commit_lsn pg_lsn, commit_idx bigint, table_schema text, table_name text,
               action text, message json)
LANGUAGE plpgsql AS $$
DECLARE
    settings walbrook.pull_settings;
    there    bigint;
    shares   integer[] := array_fill(0, ARRAY[cardinality(batch_sizes)]);
    turn     record;
    handed   walbrook.received[];
    bytes    bigint := 0;
BEGIN
    settings := walbrook.pull_consumer(receive_shared.consumer, to_receive => true);
    IF NOT walbrook.claimable(settings.consumer) THEN
        RETURN;
    END IF;
    there := walbrook.available(settings.consumer, (SELECT sum(b) FROM unnest(batch_sizes) b));
    -- The smallest wishes are met first; what they leave is shared by the others.
    FOR turn IN SELECT b.size, b.at, cardinality(batch_sizes) - row_number() OVER (ORDER BY b.size, b.at) + 1 AS others
                  FROM unnest(batch_sizes) WITH ORDINALITY b (size, at) ORDER BY 1, 2 LOOP
        shares[turn.at] := least(turn.size, there / turn.others);
        there := there - shares[turn.at];
    END LOOP;
    FOR turn IN SELECT b.size, b.at FROM unnest(batch_sizes) WITH ORDINALITY b (size, at) ORDER BY 2 LOOP
        IF there > 0 AND shares[turn.at] < turn.size THEN
            shares[turn.at] := shares[turn.at] + 1;
            there := there - 1;
        END IF;
        CONTINUE WHEN shares[turn.at] = 0;
        IF cardinality(batch_sizes) = 1 THEN
            RETURN QUERY SELECT turn.at::integer, c.*
                           FROM walbrook.claim(settings.consumer, shares[turn.at], visibilities[turn.at],
                                               left(holders[turn.at], 200)) c;
            RETURN;
        END IF;
        SELECT array_agg(c), bytes + coalesce(sum(octet_length(c.message::text)), 0) INTO handed, bytes
          FROM walbrook.claim(settings.consumer, shares[turn.at], visibilities[turn.at],
                              left(holders[turn.at], 200)) c;
        RETURN QUERY SELECT turn.at::integer, h.* FROM unnest(handed) h;
        EXIT WHEN bytes >= walbrook.receive_bytes_max();  -- those who are left are served by the next pass
    END LOOP;
END
$$;

COMMENT ON FUNCTION walbrook.receive_shared IS 'What walbrook.receive does, for many claimers in one pass; claimer counts them from 1.';
