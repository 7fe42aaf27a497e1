-- The ledger of a consumer that was moved back or removed starts over.

CREATE OR REPLACE FUNCTION walbrook.begin_ledger_anew() RETURNS trigger
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

-- A function moves it back, or a person with an UPDATE.
CREATE OR REPLACE TRIGGER moved_back BEFORE UPDATE OF cursor_lsn, cursor_idx ON walbrook.consumers
    FOR EACH ROW WHEN ((NEW.cursor_lsn, NEW.cursor_idx) < (OLD.cursor_lsn, OLD.cursor_idx))
    EXECUTE FUNCTION walbrook.begin_ledger_anew();

CREATE OR REPLACE TRIGGER drop_ledger AFTER DELETE ON walbrook.consumers
    FOR EACH ROW EXECUTE FUNCTION walbrook.begin_ledger_anew();
