-- The configuration of a running service: planned and applied.

-- A request is answered by the service, in the row of the number that this returns.
CREATE OR REPLACE FUNCTION walbrook.request_config(action text, source text, partly boolean)
RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    request bigint;
    runs walbrook.configurations;
BEGIN
    SELECT * INTO runs FROM walbrook.configurations k
     WHERE request_config.source IS NULL OR request_config.source = ANY (k.sources)
     ORDER BY k.revision DESC LIMIT 1;
    IF runs.revision IS NULL THEN
        RAISE EXCEPTION '%', CASE WHEN request_config.source IS NULL THEN 'no service has run yet'
                                  ELSE format('no service has run with a database %s', request_config.source) END
            USING ERRCODE = 'no_data_found', HINT = 'walbrook.configurations lists what runs';
    END IF;
    IF request_config.source IS NULL
       AND EXISTS (SELECT FROM walbrook.sources s
                    WHERE s.state <> 'stopped' AND s.name <> ALL (runs.sources)) THEN
        RAISE EXCEPTION 'several services share this state database'
            USING ERRCODE = 'too_many_rows',
                  HINT = 'name a database of the one that is meant as source';
    END IF;
    -- The lock that a service holds for each of its sources.
    IF pg_try_advisory_lock(hashtextextended('walbrook.source.' || runs.sources[1], 0)) THEN
        PERFORM pg_advisory_unlock(hashtextextended('walbrook.source.' || runs.sources[1], 0));
        RAISE EXCEPTION 'the service of % does not run', array_to_string(runs.sources, ', ')
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'start it: it runs the file as it is then';
    END IF;
    INSERT INTO walbrook.config_requests (action, source, partly)
    VALUES (request_config.action, coalesce(request_config.source, runs.sources[1]),
            coalesce(request_config.partly, false))
    RETURNING id INTO request;
    DELETE FROM walbrook.config_requests r WHERE r.id <= request - 1000;
    IF request_config.action = 'apply' THEN
        PERFORM walbrook.note_act('apply_config', jsonb_build_object(
            'source', request_config.source, 'partly', coalesce(request_config.partly, false)), 'asked');
    END IF;
    PERFORM pg_notify('walbrook_config', request::text);
    RETURN request;
END
$$;

CREATE OR REPLACE FUNCTION walbrook.plan_config(source text DEFAULT NULL, partly boolean DEFAULT false)
RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT walbrook.request_config('plan', plan_config.source, plan_config.partly)
$$;

COMMENT ON FUNCTION walbrook.plan_config IS 'Ask the running service what its configuration file would change. Returns the number of the request: walbrook.config_answer has the answer.';

CREATE OR REPLACE FUNCTION walbrook.apply_config(source text DEFAULT NULL, partly boolean DEFAULT false)
RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT walbrook.request_config('apply', apply_config.source, apply_config.partly)
$$;

COMMENT ON FUNCTION walbrook.apply_config IS 'Ask the running service to run its configuration file as it is now. partly: leave out what needs a restart. Returns the number of the request: walbrook.config_answer has the answer.';

-- Volatile: each look sees what was committed before it.
CREATE OR REPLACE FUNCTION walbrook.config_answer(request bigint DEFAULT NULL, wait interval DEFAULT '60 s')
RETURNS walbrook.config_requests
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until CONSTANT timestamptz := clock_timestamp() + least(config_answer.wait, interval '10 min');
    wanted CONSTANT bigint := coalesce(config_answer.request, (SELECT max(id) FROM walbrook.config_requests));
    answer walbrook.config_requests;
BEGIN
    LOOP
        SELECT * INTO answer FROM walbrook.config_requests r WHERE r.id = wanted;
        IF answer.id IS NULL THEN
            RAISE EXCEPTION 'there is no request %', coalesce(wanted::text, 'yet')
                USING ERRCODE = 'no_data_found', HINT = 'walbrook.apply_config() makes one';
        END IF;
        EXIT WHEN answer.state NOT IN ('waiting', 'working') OR clock_timestamp() >= until;
        PERFORM pg_sleep(0.1);
    END LOOP;
    RETURN answer;
END
$$;

COMMENT ON FUNCTION walbrook.config_answer IS 'What became of a request of plan_config or apply_config, or of the latest; waits until it is answered.';

CREATE OR REPLACE FUNCTION walbrook.running_config(source text DEFAULT NULL) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT k.document FROM walbrook.configurations k
     WHERE running_config.source IS NULL OR running_config.source = ANY (k.sources)
     ORDER BY k.revision DESC LIMIT 1
$$;

COMMENT ON FUNCTION walbrook.running_config IS 'The configuration file as the service runs it, without its secrets.';
