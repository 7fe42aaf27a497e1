-- Who may do what: functions that grant a role the rights of a monitor, an operator or a pull worker.
--
-- The functions that such roles call run with the rights of the schema's owner, so that no role needs
-- rights on the tables behind them. A pull worker may fetch from a consumer if it may read the
-- consumer's partition of walbrook.pull_messages; walbrook.pull_consumer checks that.
CREATE OR REPLACE FUNCTION walbrook.functions_of(access text) RETURNS SETOF regprocedure
LANGUAGE sql STABLE AS $$
    SELECT p.oid::regprocedure FROM pg_proc p
     WHERE p.pronamespace = 'walbrook'::regnamespace
       AND p.proname = ANY (CASE access
           WHEN 'monitor' THEN ARRAY['called', 'is_paused', 'dead_ever', 'parse_cursor', 'cursor_text', 'cursor_key',
                                     'trace']
           WHEN 'operator' THEN ARRAY['pause', 'resume', 'rewind', 'skip_to', 'discard_all', 'redeliver',
                                      'discard', 'accept_gap', 'accept_loss', 'finish_source',
                                      'advance_watermark', 'set_partition_idle', 'start_backfill',
                                      'pause_backfill', 'resume_backfill', 'cancel_backfill',
                                      'retry_backfill', 'skip_backfill', 'start_verification',
                                      'cancel_verification', 'forget', 'forget_source', 'plan_config',
                                      'apply_config', 'config_answer', 'running_config']
           WHEN 'values' THEN ARRAY['start_live_trace', 'live_samples', 'end_live_trace']
           WHEN 'pull' THEN ARRAY['receive', 'ack', 'nack', 'extend'] END)
        -- Who reads a view must be allowed to call the functions in it.
        OR p.pronamespace = 'walbrook'::regnamespace AND access = 'monitor' AND EXISTS (
           SELECT FROM pg_depend d
            WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_proc'::regclass
              AND d.refobjid = p.oid)
$$;

COMMENT ON FUNCTION walbrook.functions_of IS 'The functions that a monitor, an operator, one who may see row values (access: values) or a pull worker (access: pull) may call.';

CREATE OR REPLACE FUNCTION walbrook.grant_functions(role text, access text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    called regprocedure;
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA walbrook TO %I', role);
    FOR called IN SELECT walbrook.functions_of(access) LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', called, role);
    END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION walbrook.grant_monitor(role text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM walbrook.grant_functions(role, 'monitor');
    EXECUTE format(
        'GRANT SELECT ON walbrook.cursors, walbrook.sources, walbrook.consumers, walbrook.health, '
        'walbrook.health_events, walbrook.health_states, walbrook.gaps, walbrook.feeds, walbrook.pressure, '
        'walbrook.queues, '
        'walbrook.backlogs, walbrook.leases, walbrook.log_segments, walbrook.schema_versions, walbrook.watermarks, '
        'walbrook.event_time, walbrook.event_sources, walbrook.event_partitions, walbrook.pull_settings, '
        'walbrook.pull_positions, walbrook.pull_claims, walbrook.pull_dead_counts, '
        'walbrook.backfill_progress, walbrook.horizons, walbrook.repairs, walbrook.repair_progress, '
        'walbrook.repaired_tables, walbrook.verifications, walbrook.verified, '
        'walbrook.audit TO %I', role);
    -- Not error, payload and event, which have row values in them.
    EXECUTE format(
        'GRANT SELECT (id, source, consumer, commit_lsn, commit_idx, commit_timestamp, table_schema, '
        'table_name, action, kind, deliveries, dead_at) ON walbrook.dead_letters TO %I', role);
    PERFORM walbrook.note_act('grant_monitor', jsonb_build_object('role', role));
END
$$;

COMMENT ON FUNCTION walbrook.grant_monitor IS 'Let a role read positions, health and queues; it can change nothing, and sees no row values.';

CREATE OR REPLACE FUNCTION walbrook.grant_operator(role text, with_values boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM walbrook.grant_monitor(role);
    PERFORM walbrook.grant_functions(role, 'operator');
    EXECUTE format('GRANT SELECT ON walbrook.configurations, walbrook.config_requests TO %I', role);
    IF with_values THEN
        PERFORM walbrook.grant_functions(role, 'values');
        EXECUTE format('GRANT SELECT ON walbrook.dead_letters, walbrook.events, walbrook.pull_messages, '
                       'walbrook.claim_checks, walbrook.verification_keys TO %I', role);
    END IF;
    PERFORM walbrook.note_act('grant_operator', jsonb_build_object('role', role, 'with_values', with_values));
END
$$;

COMMENT ON FUNCTION walbrook.grant_operator IS 'Let a role do what a monitor does, and pause, resume, rewind, skip, redeliver, discard, push watermarks, mark partitions, accept gaps and losses, and apply the configuration; with_values: also read dead letters and what waits, and trace consumers live, row values included.';

CREATE OR REPLACE FUNCTION walbrook.grant_pull(role text, VARIADIC consumers text[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    name text;
BEGIN
    PERFORM walbrook.grant_functions(role, 'pull');
    FOREACH name IN ARRAY consumers LOOP
        EXECUTE format('GRANT SELECT ON walbrook.pull_messages_%s TO %I',
                       (walbrook.pull_consumer(name)).consumer, role);
    END LOOP;
    PERFORM walbrook.note_act('grant_pull', jsonb_build_object('role', role, 'consumers', to_jsonb(consumers)));
END
$$;

COMMENT ON FUNCTION walbrook.grant_pull IS 'Let a role receive and acknowledge messages of these pull consumers, and of no others.';

CREATE OR REPLACE FUNCTION walbrook.revoke_access(role text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA walbrook FROM %I', role);
    EXECUTE format('REVOKE ALL (id, source, consumer, commit_lsn, commit_idx, commit_timestamp, table_schema, '
                   'table_name, action, kind, deliveries, dead_at) ON walbrook.dead_letters FROM %I', role);
    EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA walbrook FROM %I', role);
    EXECUTE format('REVOKE ALL ON SCHEMA walbrook FROM %I', role);
    PERFORM walbrook.note_act('revoke_access', jsonb_build_object('role', role));
END
$$;

COMMENT ON FUNCTION walbrook.revoke_access IS 'Take all rights in schema walbrook from a role.';
