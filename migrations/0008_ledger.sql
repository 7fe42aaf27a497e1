-- The ledger: what was delivered and is not settled yet, for destinations that take a repeat for new.

-- The name of a consumer's ledger, wherever that is kept. It is never used for two things: a consumer
-- that is made anew, and one whose cursor is moved back, is to get again what it was sent before.
ALTER TABLE walbrook.consumers
    ADD COLUMN ledger uuid NOT NULL DEFAULT gen_random_uuid() UNIQUE;

COMMENT ON COLUMN walbrook.consumers.ledger IS 'What its ledger is known by; another one each time its cursor is moved back.';

-- One row per request that was accepted, or per message that came from a queue. Rows come and go with every micro-batch, so they are cleared
-- away by their number, not by their share of a table that is almost empty.
CREATE TABLE walbrook.ledger (
    ledger   uuid NOT NULL,
    queued   boolean NOT NULL DEFAULT false,
    high_lsn pg_lsn NOT NULL,
    high_idx bigint NOT NULL,
    cursors  bytea NOT NULL,
    noted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (ledger, queued, high_lsn, high_idx)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000);

COMMENT ON TABLE walbrook.ledger IS 'Messages that were accepted above their consumer''s cursor: what is left out if it comes again. Empty while a ledger in Redis is configured.';
COMMENT ON COLUMN walbrook.ledger.ledger IS 'walbrook.consumers.ledger.';
COMMENT ON COLUMN walbrook.ledger.queued IS 'Whether they came from the consumer''s queue, where the cursor says nothing of them.';
COMMENT ON COLUMN walbrook.ledger.high_lsn IS 'With high_idx: the highest of the cursors.';
COMMENT ON COLUMN walbrook.ledger.cursors IS 'Sixteen bytes each: LSN and index, big-endian.';

CREATE FUNCTION walbrook.begin_ledger_anew() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM walbrook.ledger l WHERE l.ledger = OLD.ledger;
    IF TG_OP = 'UPDATE' THEN
        NEW.ledger := gen_random_uuid();
        NEW.top_lsn := NULL;
        NEW.top_idx := NULL;
        NEW.lost_at := NULL;
        RETURN NEW;
    END IF;
    RETURN NULL;
END
$$;

-- Whoever moves it back, a function or a person with an UPDATE.
CREATE TRIGGER moved_back BEFORE UPDATE OF cursor_lsn, cursor_idx ON walbrook.consumers
    FOR EACH ROW WHEN ((NEW.cursor_lsn, NEW.cursor_idx) < (OLD.cursor_lsn, OLD.cursor_idx))
    EXECUTE FUNCTION walbrook.begin_ledger_anew();
CREATE TRIGGER drop_ledger AFTER DELETE ON walbrook.consumers
    FOR EACH ROW EXECUTE FUNCTION walbrook.begin_ledger_anew();
