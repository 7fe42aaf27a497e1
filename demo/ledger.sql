-- What was written to the shop, noted by triggers in the same transaction. The schema is outside
-- of the publication. A row's digest is of its text, which pinned settings make the same for all.
CREATE SCHEMA ledger;

CREATE TABLE ledger.entries (
    n          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    xid        bigint NOT NULL,
    table_name text NOT NULL,
    action     text NOT NULL,
    key        jsonb NOT NULL,
    old_key    jsonb NOT NULL,
    digest     text, -- of the row as it is now; of the old one if it was deleted
    before     text  -- of the row before an update
);

CREATE FUNCTION ledger.key_of(record jsonb, VARIADIC columns text[]) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_agg(record ->> name ORDER BY place)
      FROM unnest(columns) WITH ORDINALITY AS c (name, place)
$$;

-- Without the full identity the source does not say what the old row was: nothing to compare.
CREATE FUNCTION ledger.note() RETURNS trigger
LANGUAGE plpgsql SET timezone = 'UTC' SET datestyle = 'ISO' AS $$
DECLARE
    full_identity boolean :=
        TG_OP <> 'INSERT' AND (SELECT relreplident = 'f' FROM pg_class WHERE oid = TG_RELID);
    key jsonb;
    old_key jsonb;
BEGIN
    key := ledger.key_of(to_jsonb(coalesce(NEW, OLD)), VARIADIC TG_ARGV::text[]);
    old_key := ledger.key_of(to_jsonb(coalesce(OLD, NEW)), VARIADIC TG_ARGV::text[]);
    INSERT INTO ledger.entries (xid, table_name, action, key, old_key, digest, before)
    VALUES (
        -- On the wire a transaction id has 32 bits.
        pg_current_xact_id()::text::bigint & 4294967295,
        TG_TABLE_SCHEMA || '.' || TG_TABLE_NAME,
        lower(TG_OP),
        key,
        old_key,
        CASE WHEN TG_OP <> 'DELETE' THEN md5(NEW::text)
             WHEN full_identity THEN md5(OLD::text) END,
        CASE WHEN TG_OP = 'UPDATE' AND full_identity THEN md5(OLD::text) END
    );
    RETURN NULL;
END $$;

CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON public.customers
    FOR EACH ROW EXECUTE FUNCTION ledger.note('id');
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON public.products
    FOR EACH ROW EXECUTE FUNCTION ledger.note('sku');
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON public.orders
    FOR EACH ROW EXECUTE FUNCTION ledger.note('id');
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON public.order_items
    FOR EACH ROW EXECUTE FUNCTION ledger.note('order_id', 'line');
