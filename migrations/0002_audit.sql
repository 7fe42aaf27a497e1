-- Who did what: a row for each act of an operator, written by the functions themselves.
CREATE TABLE walbrook.audit (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at            timestamptz NOT NULL DEFAULT clock_timestamp(),
    channel       text NOT NULL DEFAULT 'sql',
    actor         text NOT NULL,
    database_role text NOT NULL DEFAULT session_user,
    action        text NOT NULL,
    arguments     jsonb NOT NULL DEFAULT '{}',
    result        text NOT NULL DEFAULT 'done'
);

COMMENT ON TABLE walbrook.audit IS 'What operators did, the latest 100,000 acts. An act that was refused changed nothing and has no row.';
COMMENT ON COLUMN walbrook.audit.channel IS 'sql, command line or http: as the session says of itself.';
COMMENT ON COLUMN walbrook.audit.actor IS 'The database role, the name of the HTTP token, or the user of the command line: as the session says of itself.';
COMMENT ON COLUMN walbrook.audit.database_role IS 'The role that logged in to the state database, as the server knows it.';
COMMENT ON COLUMN walbrook.audit.arguments IS 'What was asked for. Of SQL conditions and values of rows only that they were given.';

-- It takes what was asked for as one more argument.
DROP FUNCTION IF EXISTS walbrook.acted(integer, text, bigint);
