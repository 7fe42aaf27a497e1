-- The content of oversize messages, for sinks with oversize: claim_check and no URL of their own.

CREATE TABLE walbrook.claim_checks (
    location  text PRIMARY KEY,
    consumer  text NOT NULL,
    payload   bytea NOT NULL,
    stored_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX claim_checks_age ON walbrook.claim_checks (consumer, stored_at);

COMMENT ON TABLE walbrook.claim_checks IS 'Whole messages that were too large for their sink, which got a reference in their place.';
COMMENT ON COLUMN walbrook.claim_checks.location IS 'As the reference in the message names it; made of the idempotency key and the content.';
COMMENT ON COLUMN walbrook.claim_checks.payload IS 'The whole message, in the shape of its sink, as UTF-8.';
