-- Who did what: every function by which an operator changes something calls note_act.

CREATE OR REPLACE FUNCTION walbrook.audit_rows_max() RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT 100000::bigint $$;

-- The command line and the HTTP API name themselves with walbrook.channel and walbrook.actor.
CREATE OR REPLACE FUNCTION walbrook.note_act(action text, arguments jsonb, result text DEFAULT 'done')
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    noted bigint;
BEGIN
    INSERT INTO walbrook.audit (channel, actor, action, arguments, result)
    VALUES (coalesce(nullif(current_setting('walbrook.channel', true), ''), 'sql'),
            left(coalesce(nullif(current_setting('walbrook.actor', true), ''), session_user), 200),
            note_act.action, jsonb_strip_nulls(note_act.arguments), note_act.result)
    RETURNING id INTO noted;
    -- A few more than one per act, so that what a raised bound left goes too.
    DELETE FROM walbrook.audit a
     WHERE a.id IN (SELECT old.id FROM walbrook.audit old
                     WHERE old.id <= noted - walbrook.audit_rows_max()
                     ORDER BY old.id LIMIT 100 FOR UPDATE SKIP LOCKED);
END
$$;

COMMENT ON FUNCTION walbrook.note_act IS 'Add an act to walbrook.audit, and remove those beyond the latest 100,000.';
