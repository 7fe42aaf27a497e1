-- The tables, types and indexes of the schema walbrook. Functions and views stand in folders of their own.

COMMENT ON TABLE walbrook.migrations IS 'The migrations that this schema has.';
COMMENT ON TABLE walbrook.definitions IS 'The files of functions and views as they were last applied.';

-- ------------------------------------------------------------------------------------------------
-- Sources, consumers, and every position of theirs.

-- Every position that the service holds is a row here, for anyone to read.
CREATE TABLE walbrook.sources (
    name              text PRIMARY KEY,
    slot              text NOT NULL,
    publication       text NOT NULL,
    system_identifier text NOT NULL,
    -- Raised by every start of the service; what an older one still tries to settle is refused.
    term              bigint NOT NULL DEFAULT 0,
    -- The restart cursor: everything below it is settled for every consumer. It never goes back.
    restart_lsn       pg_lsn NOT NULL,
    restart_idx       bigint NOT NULL DEFAULT 0,
    restart_at        timestamptz NOT NULL DEFAULT now(),
    -- What the reader last saw: the end of the source's WAL, and the end of the change log.
    head_lsn          pg_lsn,
    log_lsn           pg_lsn,
    log_idx           bigint,
    seen_at           timestamptz,
    -- Everything that was committed before this moment has been read.
    current_at        timestamptz,
    state             text NOT NULL DEFAULT 'stopped'
                      CHECK (state IN ('stopped', 'connecting', 'streaming', 'paused', 'disconnected')),
    state_since       timestamptz NOT NULL DEFAULT now(),
    last_error        text,
    created_at        timestamptz NOT NULL DEFAULT now(),
    timeline          integer,
    publication_oid   bigint,
    durable_lsn       pg_lsn,
    durable_idx       bigint,
    earliest_lsn      pg_lsn,
    earliest_idx      bigint,
    evicted_lsn       pg_lsn,
    evicted_idx       bigint,
    log_bytes         bigint,
    heartbeat_at      timestamptz,
    heartbeat_lag_s   float8,
    slot_wal_status   text,
    slot_safe_bytes   bigint,
    heartbeat_state   text CHECK (heartbeat_state IN
                      ('off', 'ok', 'none_recent', 'stale', 'lsn_advanced', 'nothing_received'))
);

COMMENT ON TABLE walbrook.sources IS 'One row a source database: its slot, its restart cursor, the state of its reader.';
COMMENT ON COLUMN walbrook.sources.timeline IS 'The timeline that was last read; a higher one is a failover.';
COMMENT ON COLUMN walbrook.sources.publication_oid IS 'Of the publication that is read; another one of that name was made after a gap.';
COMMENT ON COLUMN walbrook.sources.durable_lsn IS 'With durable_idx: everything below is in the change log and on disk.';
COMMENT ON COLUMN walbrook.sources.earliest_lsn IS 'With earliest_idx: the first cursor that the change log can still give.';
COMMENT ON COLUMN walbrook.sources.evicted_lsn IS 'With evicted_idx: below it, unsettled changes were dropped on purpose (on_full: evict).';
COMMENT ON COLUMN walbrook.sources.log_bytes IS 'Size of the change log, all tiers.';
COMMENT ON COLUMN walbrook.sources.heartbeat_at IS 'When the last heartbeat came back through the slot.';
COMMENT ON COLUMN walbrook.sources.heartbeat_lag_s IS 'How long that heartbeat was on its way.';
COMMENT ON COLUMN walbrook.sources.heartbeat_state IS 'How heartbeats are doing. none_recent: none could be written for a while. stale: one is on its way for too long. lsn_advanced: the stream went past one without giving it. nothing_received: none has come back yet.';
COMMENT ON COLUMN walbrook.sources.slot_wal_status IS 'As in pg_replication_slots: reserved, extended, unreserved or lost.';
COMMENT ON COLUMN walbrook.sources.slot_safe_bytes IS 'WAL that may still be written before the slot is in danger; null: no limit is set.';

CREATE TABLE walbrook.consumers (
    source           text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    name             text NOT NULL,
    -- Everything below is settled for this consumer.
    cursor_lsn       pg_lsn NOT NULL,
    cursor_idx       bigint NOT NULL DEFAULT 0,
    -- Commit time of the last settled change.
    settled_commit   timestamptz,
    moved_at         timestamptz NOT NULL DEFAULT now(),
    delivered        bigint NOT NULL DEFAULT 0,
    absorbed         bigint NOT NULL DEFAULT 0,
    -- Consumers that the configuration no longer names keep their row and hold nothing back.
    active           boolean NOT NULL DEFAULT true,
    last_error       text,
    error_at         timestamptz,
    created_at       timestamptz NOT NULL DEFAULT now(),
    -- A destination that keeps a position: where it is, the last message that it was sent, and since
    -- when it is known to lack some that it had.
    place            text NOT NULL DEFAULT '',
    top_lsn          pg_lsn,
    top_idx          bigint,
    lost_at          timestamptz,
    -- What a rewind may do with what the destination holds; none where the destination keeps no
    -- position and simply gets everything again.
    rewind_ways      text[] NOT NULL DEFAULT '{}',
    reload_refusal   text,
    -- Which tables it takes, and whether what comes again is applied to them by key.
    takes            jsonb NOT NULL DEFAULT '{}',
    repeats_by_key   boolean NOT NULL DEFAULT false,
    -- Which place of the destination is in use, and how often that place was emptied. Both grow by
    -- walbrook.rewind alone.
    generation       integer NOT NULL DEFAULT 1,
    truncation       integer NOT NULL DEFAULT 0,
    dead             bigint NOT NULL DEFAULT 0,
    state            text CHECK (state IN ('live', 'catching_up', 'waiting', 'paused', 'failed')),
    state_reason     text,
    retry_at         timestamptz,
    attempts         integer NOT NULL DEFAULT 0,
    deliver_ms       float8,
    id               integer GENERATED ALWAYS AS IDENTITY UNIQUE,
    destination      text NOT NULL DEFAULT '',
    priority         integer NOT NULL DEFAULT 5,
    paused_at        timestamptz,
    breaker          text NOT NULL DEFAULT 'closed'
                     CHECK (breaker IN ('closed', 'open', 'half_open')),
    ledger           uuid NOT NULL DEFAULT gen_random_uuid() UNIQUE,
    backlog_max      bigint CHECK (backlog_max > 0),
    backlog_on_full  text CHECK (backlog_on_full IN ('warn', 'evict', 'disable')),
    backlog_excused  boolean NOT NULL DEFAULT true,
    disabled_at      timestamptz,
    disabled_reason  text CHECK (disabled_reason IN ('backlog')),
    initial_backfill text[],
    begun_lsn        pg_lsn,
    begun_idx        bigint,
    PRIMARY KEY (source, name),
    CHECK ((backlog_max IS NULL) = (backlog_on_full IS NULL)),
    CHECK ((disabled_at IS NULL) = (disabled_reason IS NULL))
);

COMMENT ON TABLE walbrook.consumers IS 'One row a consumer (a configured sink): its cursor and its counts.';
COMMENT ON COLUMN walbrook.consumers.begun_lsn IS 'With begun_idx: where it began, or was moved back to; it was never to get what lies below. Null: unknown.';
COMMENT ON COLUMN walbrook.consumers.place IS 'Where its destination is, if that keeps a position of its own.';
COMMENT ON COLUMN walbrook.consumers.top_lsn IS 'With top_idx: the last message that its destination was sent, if that keeps a position of its own.';
COMMENT ON COLUMN walbrook.consumers.lost_at IS 'When its destination was found to lack messages that it once had; walbrook.accept_loss sets it back.';
COMMENT ON COLUMN walbrook.consumers.rewind_ways IS 'What walbrook.rewind takes as destination: new_generation, truncate.';
COMMENT ON COLUMN walbrook.consumers.reload_refusal IS 'Why its tables cannot be reloaded (walbrook.start_backfill with reload => true); null: they can.';
COMMENT ON COLUMN walbrook.consumers.takes IS 'Which tables it takes: include_schemas, exclude_schemas, include_tables and exclude_tables of its configuration, as far as given.';
COMMENT ON COLUMN walbrook.consumers.repeats_by_key IS 'Whether its destination (a mirror) applies what comes again by key, so that changes of a table without one cannot be repeated.';
COMMENT ON COLUMN walbrook.consumers.generation IS 'Which place of its destination is in use: 1 is the configured one, each rewind with destination => ''new_generation'' begins the next.';
COMMENT ON COLUMN walbrook.consumers.truncation IS 'How often the place of this generation was emptied by a rewind with destination => ''truncate''.';
COMMENT ON COLUMN walbrook.consumers.dead IS 'How many changes have ever become dead letters of this consumer.';
COMMENT ON COLUMN walbrook.consumers.state IS 'What its worker does. live: it is at the head of the log; catching_up: it reads the log by itself; waiting: until retry_at; paused: by an operator; failed: an operator has to act. As the last process that served it left it; null before the first, and while it is not active.';
COMMENT ON COLUMN walbrook.consumers.state_reason IS 'Why it is not live; null if it is.';
COMMENT ON COLUMN walbrook.consumers.retry_at IS 'When its worker tries again; null unless it waits.';
COMMENT ON COLUMN walbrook.consumers.attempts IS 'Processes in a row, the running one included, that have settled nothing for it.';
COMMENT ON COLUMN walbrook.consumers.deliver_ms IS 'How long its last settled delivery took.';
COMMENT ON COLUMN walbrook.consumers.id IS 'What its queue is known by: walbrook.events_<id>.';
COMMENT ON COLUMN walbrook.consumers.destination IS 'The type of its destination.';
COMMENT ON COLUMN walbrook.consumers.priority IS 'Its share of delivery when there is more to do than can be done; more is more.';
COMMENT ON COLUMN walbrook.consumers.breaker IS 'open: its destination failed as a whole and nothing is sent until retry_at; half_open: it is being tried; closed: all is well.';
COMMENT ON COLUMN walbrook.consumers.paused_at IS 'Since when an operator holds it back; null while it is served.';
COMMENT ON COLUMN walbrook.consumers.ledger IS 'What its ledger is known by; another one each time its cursor is moved back.';
COMMENT ON COLUMN walbrook.consumers.backlog_max IS 'Bytes of the change log that it may hold (max_backlog.size); null: no bound of its own.';
COMMENT ON COLUMN walbrook.consumers.backlog_on_full IS 'What happens beyond backlog_max. warn: a health event. evict: its cursor moves on, and a gap says over what. disable: it is paused and holds the log no longer.';
COMMENT ON COLUMN walbrook.consumers.backlog_excused IS 'Whether the bound waits: until a consumer that is new, was rewound or was disabled has been within it once.';
COMMENT ON COLUMN walbrook.consumers.disabled_at IS 'Since when it holds neither the log nor the restart cursor; it is paused as well, and walbrook.resume ends both.';
COMMENT ON COLUMN walbrook.consumers.disabled_reason IS 'Why it was disabled. backlog: it had more before it than backlog_max.';
COMMENT ON COLUMN walbrook.consumers.initial_backfill IS 'The tables whose existing rows it is still to get as a new consumer, * for all; null: none, or they are in walbrook.backfills.';

CREATE TABLE walbrook.log_segments (
    source      text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    first_batch bigint NOT NULL,
    batches     bigint NOT NULL,
    rows        bigint NOT NULL,
    bytes       bigint NOT NULL,
    first_lsn   pg_lsn NOT NULL,
    first_idx   bigint NOT NULL,
    high_lsn    pg_lsn NOT NULL,
    high_idx    bigint NOT NULL,
    commit_from timestamptz,
    commit_to   timestamptz,
    sealed_at   timestamptz,
    tier        text NOT NULL CHECK (tier IN ('active', 'hot', 'cold')),
    location    text NOT NULL,
    PRIMARY KEY (source, first_batch)
);

COMMENT ON TABLE walbrook.log_segments IS 'The segments of each change log, as its reader last reported them.';
COMMENT ON COLUMN walbrook.log_segments.first_lsn IS 'With first_idx: the first cursor in the segment.';
COMMENT ON COLUMN walbrook.log_segments.high_lsn IS 'With high_idx: the cursor that the segment ends before.';
COMMENT ON COLUMN walbrook.log_segments.commit_from IS 'Commit time of its oldest change; null without changes. commit_to: of its newest.';
COMMENT ON COLUMN walbrook.log_segments.sealed_at IS 'Null while it is being written.';
COMMENT ON COLUMN walbrook.log_segments.tier IS 'active: being written; hot: in log.directory; cold: moved to log.tier.';
COMMENT ON COLUMN walbrook.log_segments.location IS 'The directory or URL that holds its files.';

CREATE TABLE walbrook.schema_versions (
    source           text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    relation         oid NOT NULL,
    version          integer NOT NULL,
    table_schema     text NOT NULL,
    table_name       text NOT NULL,
    columns          jsonb NOT NULL,
    replica_identity text NOT NULL CHECK (replica_identity IN ('default', 'nothing', 'full', 'index')),
    key              text[] NOT NULL,
    change           jsonb,
    schema           bytea NOT NULL,
    since_lsn        pg_lsn NOT NULL,
    since_idx        bigint NOT NULL,
    commit_timestamp timestamptz NOT NULL,
    announced_lsn    pg_lsn,
    announced_idx    bigint,
    seen_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (source, relation, version),
    UNIQUE (source, relation, since_lsn, since_idx),
    UNIQUE (source, announced_lsn, announced_idx),
    CHECK ((version = 1) = (change IS NULL) AND (change IS NULL) = (announced_lsn IS NULL)
                     AND (announced_lsn IS NULL) = (announced_idx IS NULL))
);

COMMENT ON TABLE walbrook.schema_versions IS 'The versions of each table that changes were read of, and what each changed. The reader writes a version before its first change is in the log.';
COMMENT ON COLUMN walbrook.schema_versions.relation IS 'The table''s oid in the source: it stays when the table is renamed.';
COMMENT ON COLUMN walbrook.schema_versions.version IS 'Counts from 1, the version in which the table was first seen.';
COMMENT ON COLUMN walbrook.schema_versions.columns IS 'In order: name, type, and whether it is part of the key.';
COMMENT ON COLUMN walbrook.schema_versions.key IS 'The columns of the key, in key order.';
COMMENT ON COLUMN walbrook.schema_versions.change IS 'What differs from the version before: the record of its schema_change message. Null for the first.';
COMMENT ON COLUMN walbrook.schema_versions.schema IS 'The Relation message as the change log keeps it.';
COMMENT ON COLUMN walbrook.schema_versions.since_lsn IS 'With since_idx: the cursor of the first change that was written with it.';
COMMENT ON COLUMN walbrook.schema_versions.commit_timestamp IS 'When the transaction of that change was committed.';
COMMENT ON COLUMN walbrook.schema_versions.announced_lsn IS 'With announced_idx: the cursor of its schema_change message. Null for the first.';

-- What the feed of a source is doing, and what each consumer's worker is doing.
CREATE TABLE walbrook.feeds (
    source     text PRIMARY KEY REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    run        bigint NOT NULL DEFAULT 1,
    attempts   integer NOT NULL DEFAULT 1,
    cursor_lsn pg_lsn,
    cursor_idx bigint,
    plan       text CHECK (plan IN ('driver', 'executors', 'cluster')),
    rows       bigint,
    decode_ms  float8,
    ranges     integer NOT NULL DEFAULT 0,
    bytes      bigint NOT NULL DEFAULT 0,
    settle_ms  float8,
    last_error text,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    settled_at timestamptz
);

COMMENT ON TABLE walbrook.feeds IS 'The decoded ranges at the head of each source''s log, which all consumers that are there share.';
COMMENT ON COLUMN walbrook.feeds.run IS 'Counts the processes that served the source; what an earlier one still tries to settle is refused.';
COMMENT ON COLUMN walbrook.feeds.attempts IS 'Processes in a row, this one included, that have not decoded and settled anything.';
COMMENT ON COLUMN walbrook.feeds.cursor_lsn IS 'With cursor_idx: how far the log was read.';
COMMENT ON COLUMN walbrook.feeds.plan IS 'Where the last range was decoded: in the driver, on executors of its machine, or on a cluster.';
COMMENT ON COLUMN walbrook.feeds.rows IS 'Changes in the last range.';
COMMENT ON COLUMN walbrook.feeds.decode_ms IS 'How long decoding the last range took.';
COMMENT ON COLUMN walbrook.feeds.ranges IS 'Ranges that wait in the feed for a worker.';
COMMENT ON COLUMN walbrook.feeds.bytes IS 'Bytes of decoded rows that wait in the driver''s memory.';
COMMENT ON COLUMN walbrook.feeds.settle_ms IS 'How long the last settling transaction took.';
COMMENT ON COLUMN walbrook.feeds.last_error IS 'What keeps the feed from moving; null while it moves.';
COMMENT ON COLUMN walbrook.feeds.settled_at IS 'When cursors were last settled.';

-- ------------------------------------------------------------------------------------------------
-- What is wrong, and what is given up.

-- What is wrong, since when, and what to do. A condition that ends is resolved, not deleted; a
-- thousand resolved ones are kept of each source.
CREATE TABLE walbrook.health_events (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source      text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    consumer    text,
    kind        text NOT NULL,
    severity    text NOT NULL CHECK (severity IN ('warning', 'error')),
    what        text NOT NULL,
    fix         text NOT NULL DEFAULT '',
    since       timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    resolved_at timestamptz
);

CREATE UNIQUE INDEX health_events_open
    ON walbrook.health_events (source, coalesce(consumer, ''), kind) WHERE resolved_at IS NULL;

CREATE INDEX health_events_resolved
    ON walbrook.health_events (source, id) WHERE resolved_at IS NOT NULL;

COMMENT ON TABLE walbrook.health_events IS 'What was or is wrong with a source or one of its consumers, and what to do about it.';
COMMENT ON COLUMN walbrook.health_events.consumer IS 'Null when it concerns the source as a whole.';
COMMENT ON COLUMN walbrook.health_events.kind IS 'A short name; at most one event of a kind is open for a source and consumer.';
COMMENT ON COLUMN walbrook.health_events.severity IS 'An error needs a person now; a warning will become one unless a person acts.';
COMMENT ON COLUMN walbrook.health_events.seen_at IS 'When it was last found still true (written about every ten seconds).';
COMMENT ON COLUMN walbrook.health_events.resolved_at IS 'When it was found no longer true; null while it is open.';

CREATE TABLE walbrook.repairs (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source   text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    found    text NOT NULL,
    deletes  text NOT NULL CHECK (deletes IN ('find', 'skip')),
    to_lsn   pg_lsn NOT NULL,
    begun_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

COMMENT ON TABLE walbrook.repairs IS 'One row per repair of a source whose slot had lost changes.';
COMMENT ON COLUMN walbrook.repairs.found IS 'What was wrong, as the kind of a health event: slot_missing, slot_lost and so on.';
COMMENT ON COLUMN walbrook.repairs.deletes IS 'find: deleted rows are found for every consumer; skip: where they cannot be found, the consumer does without.';
COMMENT ON COLUMN walbrook.repairs.to_lsn IS 'Where the new slot begins: changes from here on come through it.';

CREATE TABLE walbrook.gaps (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source   text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    consumer text NOT NULL,
    from_lsn pg_lsn NOT NULL,
    from_idx bigint NOT NULL,
    to_lsn   pg_lsn NOT NULL,
    to_idx   bigint NOT NULL,
    reason   text NOT NULL,
    noted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    reported_at  timestamptz,
    repair   bigint REFERENCES walbrook.repairs (id) ON DELETE SET NULL,
    bridged  jsonb,
    UNIQUE (source, consumer, from_lsn, from_idx),
    CHECK ((from_lsn, from_idx) < (to_lsn, to_idx))
);

-- Gaps that were not sent to their sink yet are looked for each second.
CREATE INDEX gaps_unreported ON walbrook.gaps (source, consumer) WHERE reported_at IS NULL;

COMMENT ON TABLE walbrook.gaps IS 'What a consumer will never get: every change from the first cursor up to, not including, the second.';
COMMENT ON COLUMN walbrook.gaps.from_lsn IS 'With from_idx: the first cursor that is lost.';
COMMENT ON COLUMN walbrook.gaps.to_lsn IS 'With to_idx: the first cursor that is not.';
COMMENT ON COLUMN walbrook.gaps.reason IS 'Why: what was evicted, or which gap an operator accepted.';
COMMENT ON COLUMN walbrook.gaps.reported_at IS 'When the consumer''s sink was sent the gap message; null until then.';
COMMENT ON COLUMN walbrook.gaps.repair IS 'The repair that bridges it; null: nothing does.';
COMMENT ON COLUMN walbrook.gaps.bridged IS 'How a repair bridges it, as the gap message says it; walbrook.repaired_tables has every table.';

CREATE TABLE walbrook.dead_letters (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source           text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    consumer         text NOT NULL,
    commit_lsn       pg_lsn NOT NULL,
    commit_idx       bigint NOT NULL,
    commit_timestamp timestamptz NOT NULL,
    table_schema     text NOT NULL,
    table_name       text NOT NULL,
    action           text NOT NULL,
    kind             text NOT NULL CHECK (kind IN ('decode', 'expression', 'delivery', 'event_time', 'late')),
    error            text NOT NULL,
    payload          bytea,
    schema           bytea,
    dead_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    event            json,
    deliveries       integer NOT NULL DEFAULT 0,
    UNIQUE (source, consumer, commit_lsn, commit_idx),
    CONSTRAINT dead_letters_content_check CHECK (payload IS NOT NULL OR event IS NOT NULL)
);

ALTER TABLE walbrook.dead_letters ALTER COLUMN payload SET STORAGE EXTERNAL;

COMMENT ON TABLE walbrook.dead_letters IS 'Changes that a consumer went on without; walbrook.redeliver sends one again if that can be, walbrook.discard acknowledges it.';
COMMENT ON COLUMN walbrook.dead_letters.commit_lsn IS 'With commit_idx: the cursor of the change.';
COMMENT ON COLUMN walbrook.dead_letters.kind IS 'At which step it failed; decode: it could not be read; expression: the consumer''s filter, transform or routing failed on it; delivery: whatever delivered it broke; event_time: its event time could not be read; late: it came after its time, and the consumer''s late_policy is dead_letter.';
COMMENT ON COLUMN walbrook.dead_letters.error IS 'What was wrong, with table, column and cursor.';
COMMENT ON COLUMN walbrook.dead_letters.payload IS 'The pgoutput message of the change as the source sent it; null for one that was refused by its sink.';
COMMENT ON COLUMN walbrook.dead_letters.schema IS 'The Relation message that it was written with, as the change log keeps it; null for a logical message.';
COMMENT ON COLUMN walbrook.dead_letters.dead_at IS 'When the consumer went on without it.';
COMMENT ON COLUMN walbrook.dead_letters.event IS 'The row of walbrook.events or walbrook.pull_messages that it was; null for one that never was a message.';
COMMENT ON COLUMN walbrook.dead_letters.deliveries IS 'How often its delivery was tried.';

-- ------------------------------------------------------------------------------------------------
-- The retry queue of push consumers, and what they accepted.

CREATE TABLE walbrook.events (
    consumer         integer NOT NULL,
    commit_lsn       pg_lsn NOT NULL,
    commit_idx       bigint NOT NULL,
    group_id         bigint,
    whole_table      boolean NOT NULL DEFAULT false,
    due_at           timestamptz,
    deliveries       integer NOT NULL DEFAULT 0,
    abandoned        integer NOT NULL DEFAULT 0,
    error            text,
    error_kind       text,
    tried_at         timestamptz,
    queued_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_id         bigint,
    holder           text,
    lease_until      timestamptz,
    commit_timestamp timestamptz NOT NULL,
    xid              bigint NOT NULL,
    table_schema     text NOT NULL,
    table_name       text NOT NULL,
    action           text NOT NULL,
    record           text,
    changes          text,
    record_pks       text NOT NULL,
    old_record_pks   text,
    unchanged        text,
    annotations      text,
    "before"         text,
    message          text,
    route            text,
    attempts         jsonb,
    PRIMARY KEY (consumer, commit_lsn, commit_idx)
) PARTITION BY LIST (consumer);

-- The claim: those that are due, then their groups in order.
CREATE INDEX events_due ON walbrook.events (consumer, due_at) WHERE due_at IS NOT NULL;

CREATE INDEX events_group ON walbrook.events (consumer, group_id, commit_lsn, commit_idx);

CREATE INDEX events_held ON walbrook.events (consumer, holder) WHERE holder IS NOT NULL;

CREATE INDEX events_whole_table ON walbrook.events (consumer, table_schema, table_name)
    WHERE whole_table;

CREATE SEQUENCE walbrook.lease_ids;

COMMENT ON TABLE walbrook.events IS 'Messages of push consumers that wait: refused ones, and those of their groups that came later. One partition a consumer.';
COMMENT ON COLUMN walbrook.events.attempts IS 'Its last ten refusals: when, the how many-th it was, and what the destination answered, without row values.';
COMMENT ON COLUMN walbrook.events.consumer IS 'walbrook.consumers.id.';
COMMENT ON COLUMN walbrook.events.commit_lsn IS 'With commit_idx: the cursor of the change.';
COMMENT ON COLUMN walbrook.events.group_id IS 'A number of its group: a message waits for every earlier one of its group. Null: it belongs to none.';
COMMENT ON COLUMN walbrook.events.whole_table IS 'It has its place among all messages of its table: a truncate, or a row whose key changed.';
COMMENT ON COLUMN walbrook.events.due_at IS 'When it is tried again; null while it waits for an earlier one.';
COMMENT ON COLUMN walbrook.events.deliveries IS 'How often its sink has refused it.';
COMMENT ON COLUMN walbrook.events.abandoned IS 'How often the process that was delivering it alone ended before it said what became of it.';
COMMENT ON COLUMN walbrook.events.error IS 'Why it was refused last, in full: it may quote the message, as the row does. Null if it has only waited.';
COMMENT ON COLUMN walbrook.events.error_kind IS 'poison: for its content; transient: for a reason that may pass.';
COMMENT ON COLUMN walbrook.events.lease_id IS 'With holder and lease_until: who is delivering it, and until when it is alone in that.';
COMMENT ON COLUMN walbrook.events.message IS 'What the consumer''s transform made of it; null without one.';
COMMENT ON COLUMN walbrook.events.route IS 'Where the consumer''s routing sends it; null for the sink''s own place.';

-- One row per request that was accepted, or per message that came from a queue. Rows come and go with every micro-batch, so they are cleared
-- away by their number, not by their share of a table that is almost empty.
CREATE TABLE walbrook.ledger (
    ledger    uuid NOT NULL,
    queued    boolean NOT NULL DEFAULT false,
    high_lsn  pg_lsn NOT NULL,
    high_idx  bigint NOT NULL,
    cursors   bytea NOT NULL,
    noted_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (ledger, queued, high_lsn, high_idx)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
              autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000);

COMMENT ON TABLE walbrook.ledger IS 'Messages that were accepted above their consumer''s cursor: what is left out if it comes again. Empty while a ledger in Redis is configured.';
COMMENT ON COLUMN walbrook.ledger.ledger IS 'walbrook.consumers.ledger.';
COMMENT ON COLUMN walbrook.ledger.queued IS 'Whether they came from the consumer''s queue, where the cursor says nothing of them.';
COMMENT ON COLUMN walbrook.ledger.high_lsn IS 'With high_idx: the highest of the cursors.';
COMMENT ON COLUMN walbrook.ledger.cursors IS 'Sixteen bytes each: LSN and index, big-endian.';

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

-- How much more there is to deliver than can be delivered, and what is done about it.
CREATE TABLE walbrook.pressure (
    source        text PRIMARY KEY REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    level         integer NOT NULL,
    since         timestamptz NOT NULL DEFAULT clock_timestamp(),
    backlog_rows  bigint NOT NULL,
    backlog_bytes bigint NOT NULL,
    latency_s     float8 NOT NULL,
    busy_ratio    float8 NOT NULL,
    widened_by    float8 NOT NULL,
    deferred      text[] NOT NULL,
    slots         integer NOT NULL,
    slots_busy    integer NOT NULL,
    waiting       integer NOT NULL,
    measured_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (level BETWEEN 0 AND 2)
) WITH (fillfactor = 50);

COMMENT ON TABLE walbrook.pressure IS 'One row per source: what waits in its log for the workers at the head of it, and what is done if that is too much. Written when it changes, at most once a second.';
COMMENT ON COLUMN walbrook.pressure.level IS '0: none; 1: micro-batches are widened; 2: the consumers of lowest priority are deferred.';
COMMENT ON COLUMN walbrook.pressure.since IS 'Since when it has this level.';
COMMENT ON COLUMN walbrook.pressure.backlog_rows IS 'Changes in the log that a worker at its head has not delivered.';
COMMENT ON COLUMN walbrook.pressure.backlog_bytes IS 'Their size in the log.';
COMMENT ON COLUMN walbrook.pressure.latency_s IS 'How long the oldest of them has been there.';
COMMENT ON COLUMN walbrook.pressure.busy_ratio IS 'Share of the last seconds in which a range was decoded or a worker at the head of the log had something to deliver.';
COMMENT ON COLUMN walbrook.pressure.widened_by IS 'How many times longer than spark.micro_batch_target_ms a micro-batch may take.';
COMMENT ON COLUMN walbrook.pressure.deferred IS 'Consumers that wait until there is less to do, for a minute at most; their cursors stay where they are.';
COMMENT ON COLUMN walbrook.pressure.slots IS 'spark.delivery_slots: deliveries that may be under way at once, of all sources together.';
COMMENT ON COLUMN walbrook.pressure.slots_busy IS 'How many of them deliver to consumers of this source.';
COMMENT ON COLUMN walbrook.pressure.waiting IS 'Deliveries of this source that wait for a slot.';

-- ------------------------------------------------------------------------------------------------
-- Pull consumers: see functions/pull_claims.sql for how a claim works.

CREATE TABLE walbrook.pull_messages (
    consumer         integer NOT NULL,
    commit_lsn       pg_lsn NOT NULL,
    commit_idx       bigint NOT NULL,
    group_id         bigint,
    whole_table      boolean NOT NULL DEFAULT false,
    bytes            integer NOT NULL,
    commit_timestamp timestamptz NOT NULL,
    stored_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    table_schema     text NOT NULL,
    table_name       text NOT NULL,
    action           text NOT NULL,
    message          json NOT NULL,
    PRIMARY KEY (consumer, commit_lsn, commit_idx)
) PARTITION BY LIST (consumer);

COMMENT ON TABLE walbrook.pull_messages IS 'Messages of pull consumers that are not acknowledged yet. One partition a consumer.';
COMMENT ON COLUMN walbrook.pull_messages.consumer IS 'walbrook.consumers.id.';
COMMENT ON COLUMN walbrook.pull_messages.commit_lsn IS 'With commit_idx: the cursor of the change.';
COMMENT ON COLUMN walbrook.pull_messages.group_id IS 'A number of its group: a message waits for every earlier one of its group. Null: it belongs to none.';
COMMENT ON COLUMN walbrook.pull_messages.whole_table IS 'It has its place among all messages of its table, as a truncate has.';
COMMENT ON COLUMN walbrook.pull_messages.bytes IS 'Size of the message.';
COMMENT ON COLUMN walbrook.pull_messages.message IS 'The message as the consumer gets it.';

CREATE TABLE walbrook.pull_in_flight (
    consumer     integer NOT NULL,
    commit_lsn   pg_lsn NOT NULL,
    commit_idx   bigint NOT NULL,
    group_id     bigint,
    lease_id     bigint,
    lease_until  timestamptz,
    due_at       timestamptz,
    deliveries   integer NOT NULL,
    whole_table  boolean NOT NULL,
    table_schema text NOT NULL,
    table_name   text NOT NULL,
    holder       text,
    error        text,
    PRIMARY KEY (consumer, commit_lsn, commit_idx)
) PARTITION BY LIST (consumer);

CREATE INDEX pull_in_flight_deadline ON walbrook.pull_in_flight (consumer, lease_until)
    WHERE lease_until IS NOT NULL;

CREATE INDEX pull_in_flight_due ON walbrook.pull_in_flight (consumer, due_at) WHERE due_at IS NOT NULL;

CREATE INDEX pull_in_flight_group ON walbrook.pull_in_flight (consumer, group_id, commit_lsn, commit_idx)
    WHERE group_id IS NOT NULL;

CREATE INDEX pull_in_flight_waiting ON walbrook.pull_in_flight (consumer, group_id, commit_lsn, commit_idx)
    WHERE lease_until IS NULL AND due_at IS NULL;

CREATE INDEX pull_in_flight_whole_table ON walbrook.pull_in_flight (consumer, table_schema, table_name)
    WHERE whole_table;

COMMENT ON TABLE walbrook.pull_in_flight IS 'Messages of pull consumers that were handed out, came back, or wait for an earlier one of their group. One partition a consumer.';
COMMENT ON COLUMN walbrook.pull_in_flight.lease_id IS 'The claim that handed it out last; only who has it may acknowledge it. Null once it was given back.';
COMMENT ON COLUMN walbrook.pull_in_flight.lease_until IS 'Until when its holder keeps it; null without a holder. After that the next claim takes it, and until then its holder may still acknowledge it.';
COMMENT ON COLUMN walbrook.pull_in_flight.due_at IS 'From when it can be handed out again. With lease_until null too: it waits for an earlier one.';
COMMENT ON COLUMN walbrook.pull_in_flight.deliveries IS 'How often it was handed out.';
COMMENT ON COLUMN walbrook.pull_in_flight.error IS 'What its last holder said when it gave it back.';

CREATE TABLE walbrook.pull_settings (
    consumer       integer PRIMARY KEY REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    visibility_s   integer NOT NULL,
    max_in_flight  integer NOT NULL,
    max_deliveries integer NOT NULL,
    retry_first_ms integer NOT NULL,
    retry_max_ms   integer NOT NULL,
    max_messages   bigint,
    max_bytes      bigint,
    ttl_s          bigint,
    max_waiting    integer NOT NULL,
    gap_message    text NOT NULL
);

COMMENT ON TABLE walbrook.pull_settings IS 'The settings of each pull consumer, as its configuration had them at the last start. A claim locks its row.';
COMMENT ON COLUMN walbrook.pull_settings.gap_message IS 'What a gap looks like in the consumer''s shape, with marks where the cursor, the time and the reason go.';

CREATE TABLE walbrook.pull_positions (
    consumer      integer PRIMARY KEY REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    commit_lsn    pg_lsn NOT NULL,
    commit_idx    bigint NOT NULL,
    messages_most bigint NOT NULL DEFAULT 0,
    bytes_most    bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 20);

COMMENT ON TABLE walbrook.pull_positions IS 'How far each pull consumer''s messages are stored. Storing locks its row.';
COMMENT ON COLUMN walbrook.pull_positions.commit_lsn IS 'With commit_idx: the cursor of the last message that was stored; what comes again is known by it.';
COMMENT ON COLUMN walbrook.pull_positions.messages_most IS 'At most so many messages wait: those counted last and all that came since.';

-- A row is put behind the last one and that one taken away, never rewritten: the newest is found at
-- the end of the index however many dead ones an old snapshot keeps before it.
CREATE TABLE walbrook.pull_claims (
    consumer   integer NOT NULL REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    lease_id   bigint NOT NULL,
    commit_lsn pg_lsn NOT NULL,
    commit_idx bigint NOT NULL,
    swept_to   timestamptz NOT NULL DEFAULT '-infinity',
    swept_at   timestamptz NOT NULL DEFAULT '-infinity',
    rows_most  integer NOT NULL DEFAULT 0,
    held_most  integer NOT NULL DEFAULT 0,
    passed     integer NOT NULL DEFAULT 0,
    looked_at  integer NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer, lease_id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

COMMENT ON TABLE walbrook.pull_claims IS 'Of each pull consumer the last claim, and where it got to.';
COMMENT ON COLUMN walbrook.pull_claims.commit_lsn IS 'With commit_idx: everything up to here was handed out, or passed over for its group, or is gone.';
COMMENT ON COLUMN walbrook.pull_claims.swept_to IS 'Leases that ended by then were looked at.';
COMMENT ON COLUMN walbrook.pull_claims.swept_at IS 'When all leases were last looked at, whenever they ended: a clock may have been set back.';
COMMENT ON COLUMN walbrook.pull_claims.rows_most IS 'At most so many rows are in flight: those counted last and all that came since. held_most: of them, handed out.';
COMMENT ON COLUMN walbrook.pull_claims.passed IS 'How many it passed over because an earlier one of their group is not done.';
COMMENT ON COLUMN walbrook.pull_claims.looked_at IS 'How many it looked at, in its last step.';

-- Adding to it puts a row in place of those that are not locked, so that no transaction waits.
CREATE TABLE walbrook.pull_dead_counts (
    id       bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    consumer integer NOT NULL REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    messages bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

CREATE INDEX pull_dead_counts_consumer ON walbrook.pull_dead_counts (consumer);

COMMENT ON TABLE walbrook.pull_dead_counts IS 'How many messages of each pull consumer have ever become dead letters after they were stored: the sum of its rows. walbrook.consumers.dead counts those before.';

-- ------------------------------------------------------------------------------------------------
-- The order of event time.

CREATE TABLE walbrook.event_time (
    consumer     text PRIMARY KEY,
    ordering     text NOT NULL DEFAULT 'event_time' CHECK (ordering IN ('event_time', 'processing_time')),
    base_lsn     pg_lsn NOT NULL,
    sequence     bigint NOT NULL DEFAULT 0,
    watermark    bigint,
    pushed_to    bigint,
    planned      boolean NOT NULL DEFAULT false,
    planned_from bigint,
    planned_to   bigint,
    order_mark   text NOT NULL DEFAULT '',
    sent_mark    text,
    moved_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (planned = (planned_to IS NOT NULL))
);

COMMENT ON TABLE walbrook.event_time IS 'Consumers in event-time order: one row each, whatever number of databases it reads.';
COMMENT ON COLUMN walbrook.event_time.base_lsn IS 'With sequence: what its next message is numbered; above every cursor that it ever had as a consumer in commit order.';
COMMENT ON COLUMN walbrook.event_time.sequence IS 'How many messages it has released.';
COMMENT ON COLUMN walbrook.event_time.watermark IS 'Microseconds since 1970: everything at or below it was released. Null before the first.';
COMMENT ON COLUMN walbrook.event_time.ordering IS 'As the sink''s configuration says: by the time in its rows, or by the time of their arrival.';
COMMENT ON COLUMN walbrook.event_time.pushed_to IS 'Microseconds since 1970: the watermark is at least that (walbrook.advance_watermark). Null if that was not called since it began.';
COMMENT ON COLUMN walbrook.event_time.planned IS 'Whether a release is under way: from planned_from, exclusive, to planned_to. After a crash it is made again, the same to the last message.';
COMMENT ON COLUMN walbrook.event_time.order_mark IS 'Stands for what its configuration says of event times. With another one the same changes have other times, so it starts over at its cursors.';
COMMENT ON COLUMN walbrook.event_time.sent_mark IS 'Stands for what the messages on their way are made of; null if none are. If that has changed after a crash, numbers begin that no destination has seen.';

CREATE TABLE walbrook.event_sources (
    consumer    integer PRIMARY KEY REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    ledger      uuid NOT NULL,
    cursor_lsn  pg_lsn NOT NULL,
    cursor_idx  bigint NOT NULL,
    read_lsn    pg_lsn NOT NULL,
    read_idx    bigint NOT NULL,
    settled_to  bigint,
    planned_lsn pg_lsn,
    planned_idx bigint,
    finished_at timestamptz,
    pushed_to   bigint,
    arrived     jsonb NOT NULL DEFAULT '[]'
);

COMMENT ON TABLE walbrook.event_sources IS 'How far such a consumer has read each of its databases. From its cursor up to there, what is due at or below settled_to was delivered; the rest is in its buffer.';
COMMENT ON COLUMN walbrook.event_sources.ledger IS 'walbrook.consumers.ledger when it was written: another one says that the cursor was moved back, and that all from there on comes again.';
COMMENT ON COLUMN walbrook.event_sources.cursor_lsn IS 'With cursor_idx: where its cursor was when it was written. Above it, it was moved forward.';
COMMENT ON COLUMN walbrook.event_sources.planned_lsn IS 'With planned_idx: how far the release under way has read.';
COMMENT ON COLUMN walbrook.event_sources.finished_at IS 'Since when this database is said to have ended (walbrook.finish_source): its time is not waited for.';
COMMENT ON COLUMN walbrook.event_sources.pushed_to IS 'The same as walbrook.event_time.pushed_to for the tables of this database.';
COMMENT ON COLUMN walbrook.event_sources.arrived IS 'In processing-time order: from which cursor on (LSN as a number, index) changes have arrived at which time at the earliest, where their commits alone do not say so.';

CREATE TABLE walbrook.event_partitions (
    consumer    integer NOT NULL REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    table_name  text NOT NULL,
    last_event  bigint,
    seen_to     bigint,
    watermark   bigint,
    idle_since  timestamptz,
    buffered    bigint NOT NULL DEFAULT 0,
    late        bigint NOT NULL DEFAULT 0,
    marked_idle boolean NOT NULL DEFAULT false,
    marked_at   timestamptz,
    shown_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, table_name)
);

COMMENT ON TABLE walbrook.event_partitions IS 'The partitions of such a consumer: its tables in each of its databases.';
COMMENT ON COLUMN walbrook.event_partitions.last_event IS 'The largest event time of what was read when it was last settled.';
COMMENT ON COLUMN walbrook.event_partitions.seen_to IS 'The largest event time seen when it was last shown.';
COMMENT ON COLUMN walbrook.event_partitions.marked_idle IS 'Whether an operator has marked it idle (walbrook.set_partition_idle).';
COMMENT ON COLUMN walbrook.event_partitions.marked_at IS 'When an operator last marked it, idle or active.';

-- ------------------------------------------------------------------------------------------------
-- Existing rows: backfill, verification, repair.

-- Backfills: rows that exist already, read in chunks and delivered among the changes.
CREATE TABLE walbrook.backfills (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source          text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    consumer        text NOT NULL,
    table_schema    text NOT NULL,
    table_name      text NOT NULL,
    state           text NOT NULL DEFAULT 'waiting'
                    CHECK (state IN ('waiting', 'running', 'paused', 'failed', 'done', 'cancelled', 'skipped')),
    reason          text,
    waits_for       text CHECK (waits_for IN ('open_transactions', 'source', 'retry', 'swap', 'changes', 'sink')),
    waits_since     timestamptz,
    -- What was asked for.
    reload          boolean NOT NULL DEFAULT false,
    where_sql       text,
    sort_column     text,
    start_position  text,
    chunk_bytes     bigint NOT NULL DEFAULT 67108864 CHECK (chunk_bytes > 0),
    rows_per_second bigint CHECK (rows_per_second > 0),
    connections     integer NOT NULL DEFAULT 2 CHECK (connections BETWEEN 1 AND 64),
    -- What is known of it.
    planned         boolean NOT NULL DEFAULT false,
    estimated_rows  bigint,
    estimated_bytes bigint,
    looked_lsn      pg_lsn,
    begun_lsn       pg_lsn,
    attempts        integer NOT NULL DEFAULT 0,
    error           text,
    request         bigint,
    requested_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at      timestamptz,
    finished_at     timestamptz,
    repair          bigint REFERENCES walbrook.repairs (id) ON DELETE CASCADE,
    since_xid       bigint,
    whole_reason    text,
    find_deletes    boolean NOT NULL DEFAULT false,
    kept_reason     text,
    FOREIGN KEY (source, consumer) REFERENCES walbrook.consumers (source, name) ON DELETE CASCADE
);

CREATE UNIQUE INDEX backfills_open
    ON walbrook.backfills (source, consumer, table_schema, table_name, coalesce(repair, 0))
 WHERE state IN ('waiting', 'running', 'paused', 'failed');

COMMENT ON TABLE walbrook.backfills IS 'One row per table that a consumer gets the existing rows of.';
COMMENT ON COLUMN walbrook.backfills.state IS 'waiting: nothing is read yet, see reason; running; paused: by an operator; failed: see error, walbrook.retry_backfill or walbrook.skip_backfill; done; cancelled: what was delivered stays; skipped.';
COMMENT ON COLUMN walbrook.backfills.reason IS 'What it waits for; null if for nothing.';
COMMENT ON COLUMN walbrook.backfills.waits_for IS 'open_transactions: transactions that were open before its first chunk have to end, for at most an hour; source: the source does not answer; retry: a chunk could not be read and is read again; swap: all rows of a reload are in its shadow, and its sink has yet to swap it in; changes: its sink is behind with changes, which go first; sink: its sink takes nothing, because it fails or is paused; null if for nothing.';
COMMENT ON COLUMN walbrook.backfills.reload IS 'Whether its rows go into a shadow of the table at the destination, which takes its place when all are there.';
COMMENT ON COLUMN walbrook.backfills.where_sql IS 'Only rows for which this SQL expression is true.';
COMMENT ON COLUMN walbrook.backfills.sort_column IS 'Rows are read in the order of this column, from start_position on; null: in the order in which they lie.';
COMMENT ON COLUMN walbrook.backfills.chunk_bytes IS 'About how many bytes of the table one chunk reads.';
COMMENT ON COLUMN walbrook.backfills.rows_per_second IS 'Most rows delivered per second; null: no limit.';
COMMENT ON COLUMN walbrook.backfills.connections IS 'Most chunks that are read at once.';
COMMENT ON COLUMN walbrook.backfills.planned IS 'Whether all of its chunks are in walbrook.backfill_chunks.';
COMMENT ON COLUMN walbrook.backfills.looked_lsn IS 'Up to where the log was searched for changes that left out values of rows.';
COMMENT ON COLUMN walbrook.backfills.begun_lsn IS 'Of a reload: from where on changes go into the shadow, too.';
COMMENT ON COLUMN walbrook.backfills.request IS 'Of a partition: the backfill of the whole table that was asked for; null: this one was.';
COMMENT ON COLUMN walbrook.backfills.repair IS 'The repair that asked for it; null: an operator or the configuration did.';
COMMENT ON COLUMN walbrook.backfills.since_xid IS 'Of a repair: only rows that transactions from this one on wrote (xmin); null: the whole table.';
COMMENT ON COLUMN walbrook.backfills.whole_reason IS 'Of a repair: why the whole table is read.';
COMMENT ON COLUMN walbrook.backfills.find_deletes IS 'Whether the keys at the destination are compared with those of the table.';
COMMENT ON COLUMN walbrook.backfills.kept_reason IS 'Of a repair: why deleted rows are not found, so that they stay at the destination.';

CREATE TABLE walbrook.backfill_chunks (
    backfill    bigint NOT NULL REFERENCES walbrook.backfills (id) ON DELETE CASCADE,
    number      integer NOT NULL,
    leaf_schema text NOT NULL,
    leaf_name   text NOT NULL,
    leaf_oid    oid NOT NULL,
    filenode    bigint NOT NULL,
    kind        text NOT NULL CHECK (kind IN ('blocks', 'values', 'keys', 'deletes', 'begin', 'swap', 'drop')),
    first_block bigint,
    end_block   bigint,
    after_value text,
    until_value text,
    state       text NOT NULL DEFAULT 'planned'
                CHECK (state IN ('planned', 'read', 'delivering', 'done', 'replaced')),
    -- How it was read.
    snapshot    text,
    read_lsn    pg_lsn,
    look_lsn    pg_lsn,
    file        text,
    rows        bigint,
    bytes       bigint,
    -- How far it is delivered: the piece under way has its own place among the changes.
    delivered   bigint NOT NULL DEFAULT 0,
    piece_rows  bigint,
    place_lsn   pg_lsn,
    place_idx   bigint,
    dropped     bigint NOT NULL DEFAULT 0,
    merged      bigint NOT NULL DEFAULT 0,
    attempts    integer NOT NULL DEFAULT 0,
    error       text,
    read_at     timestamptz,
    done_at     timestamptz,
    PRIMARY KEY (backfill, number)
);

COMMENT ON TABLE walbrook.backfill_chunks IS 'The parts of a backfill: each is read in one short transaction, and delivered in pieces.';
COMMENT ON COLUMN walbrook.backfill_chunks.filenode IS 'The file in which its blocks lay when it was planned; another one means that they have moved.';
COMMENT ON COLUMN walbrook.backfill_chunks.kind IS 'blocks: by ctid; values: by a column; keys: rows whose values a change left out, read once more; deletes: keys that the destination has and the table has not.';
COMMENT ON COLUMN walbrook.backfill_chunks.snapshot IS 'pg_current_snapshot() of its transaction: changes that it does not contain are newer.';
COMMENT ON COLUMN walbrook.backfill_chunks.read_lsn IS 'It is delivered once the log has passed this.';
COMMENT ON COLUMN walbrook.backfill_chunks.look_lsn IS 'From where on the log is searched for newer changes.';
COMMENT ON COLUMN walbrook.backfill_chunks.place_lsn IS 'With place_idx: the cursor of the first row of the piece under way.';
COMMENT ON COLUMN walbrook.backfill_chunks.dropped IS 'Rows that a newer change had overtaken.';
COMMENT ON COLUMN walbrook.backfill_chunks.merged IS 'Rows that a newer change had overtaken without sending all of their values.';

-- Keys of rows whose values an update left out while they may have been read by no chunk.
CREATE TABLE walbrook.backfill_keys (
    backfill bigint NOT NULL REFERENCES walbrook.backfills (id) ON DELETE CASCADE,
    key      jsonb NOT NULL,
    PRIMARY KEY (backfill, key)
);

COMMENT ON TABLE walbrook.backfill_keys IS 'Rows that are read once more by their key after the last chunk.';

-- Verifications: whether a destination holds the rows that its source holds.
CREATE TABLE walbrook.verifications (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    request          bigint,
    source           text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    consumer         text NOT NULL,
    table_schema     text,
    table_name       text,
    repair           boolean NOT NULL DEFAULT false,
    state            text NOT NULL DEFAULT 'waiting'
                     CHECK (state IN ('waiting', 'reading', 'comparing', 'repairing', 'done', 'failed', 'cancelled')),
    reason           text,
    error            text,
    -- How far it is.
    parts            bigint,
    parts_done       bigint NOT NULL DEFAULT 0,
    -- What was found.
    position         pg_lsn,
    source_rows      bigint,
    destination_rows bigint,
    missing          bigint,
    extra            bigint,
    different        bigint,
    changing         bigint,
    backfill         bigint,
    repaired         bigint,
    requested_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at       timestamptz,
    finished_at      timestamptz,
    FOREIGN KEY (source, consumer) REFERENCES walbrook.consumers (source, name) ON DELETE CASCADE
);

CREATE INDEX verifications_open ON walbrook.verifications (source, consumer)
 WHERE state IN ('waiting', 'reading', 'comparing', 'repairing');

CREATE INDEX verifications_request ON walbrook.verifications (request);

COMMENT ON TABLE walbrook.verifications IS 'One row per comparison of a table at the source with what a consumer''s destination holds.';
COMMENT ON COLUMN walbrook.verifications.request IS 'The same for all tables that were asked for at once.';
COMMENT ON COLUMN walbrook.verifications.table_name IS 'Null: all tables of the consumer, until they are known.';
COMMENT ON COLUMN walbrook.verifications.repair IS 'Whether rows that differ are delivered again.';
COMMENT ON COLUMN walbrook.verifications.state IS 'waiting: nothing is read yet; reading: the rows of both sides are read; comparing: rows that differed are looked at again; repairing: rows that differ are delivered again; done; failed: see error; cancelled.';
COMMENT ON COLUMN walbrook.verifications.reason IS 'What it waits for; null if for nothing.';
COMMENT ON COLUMN walbrook.verifications.parts IS 'Chunks of the source to read, and one part each for the destination and the comparison.';
COMMENT ON COLUMN walbrook.verifications.position IS 'Rows that have not changed since this position were compared as they are.';
COMMENT ON COLUMN walbrook.verifications.source_rows IS 'How many rows the source had while it was read.';
COMMENT ON COLUMN walbrook.verifications.destination_rows IS 'How many rows the destination had while it was read.';
COMMENT ON COLUMN walbrook.verifications.missing IS 'Rows of the source that the destination lacks.';
COMMENT ON COLUMN walbrook.verifications.extra IS 'Rows of the destination that the source does not have.';
COMMENT ON COLUMN walbrook.verifications.different IS 'Rows that both have with other values.';
COMMENT ON COLUMN walbrook.verifications.changing IS 'Rows that changed each time they were looked at: nothing is known of them.';
COMMENT ON COLUMN walbrook.verifications.backfill IS 'The backfill that delivers rows again.';
COMMENT ON COLUMN walbrook.verifications.repaired IS 'Of the rows that differed, how many are equal after the repair.';

-- Keys are values of rows: only who may read rows may read this table.
CREATE TABLE walbrook.verification_keys (
    verification bigint NOT NULL REFERENCES walbrook.verifications (id) ON DELETE CASCADE,
    key          jsonb NOT NULL,
    difference   text NOT NULL CHECK (difference IN ('missing', 'extra', 'different')),
    repaired     boolean NOT NULL DEFAULT false,
    PRIMARY KEY (verification, key)
);

COMMENT ON TABLE walbrook.verification_keys IS 'The keys of rows that differ, up to 10000, of the latest verification of each table.';
COMMENT ON COLUMN walbrook.verification_keys.key IS 'The values of the key as text, in key order.';

-- Repairs: after a lost slot, rows that changed meanwhile are read again, and rows that are gone are found.
CREATE TABLE walbrook.horizons (
    source   text NOT NULL REFERENCES walbrook.sources (name) ON DELETE CASCADE,
    lsn      pg_lsn NOT NULL,
    xid      bigint NOT NULL,
    noted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (source, lsn)
);

COMMENT ON TABLE walbrook.horizons IS 'Which transactions had ended at some places of a source''s WAL, noted while it is read. A repair needs the last one at or below a consumer''s cursor.';
COMMENT ON COLUMN walbrook.horizons.xid IS 'Every transaction below this number (64 bits) had ended, and stands below lsn in the WAL.';

-- ------------------------------------------------------------------------------------------------
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

-- ------------------------------------------------------------------------------------------------
-- The configuration that runs, and the requests to change it.

CREATE TABLE walbrook.configurations (
    revision   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sources    text[] NOT NULL,
    path       text NOT NULL,
    document   text NOT NULL,
    applied_by text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    taken_at   timestamptz
);

COMMENT ON TABLE walbrook.configurations IS 'The configurations that services have run, the latest 100: the one with the highest revision of a service is what runs.';
COMMENT ON COLUMN walbrook.configurations.sources IS 'The databases of the service.';
COMMENT ON COLUMN walbrook.configurations.path IS 'The file that it was read from.';
COMMENT ON COLUMN walbrook.configurations.document IS 'The file as it was applied. References to variables stay references; a secret in the file itself is ***.';
COMMENT ON COLUMN walbrook.configurations.applied_by IS 'start, or who asked: a role of the database, or SIGHUP.';
COMMENT ON COLUMN walbrook.configurations.taken_at IS 'Since when every worker serves by it; null: some still end what they had begun.';

CREATE TABLE walbrook.config_requests (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    action      text NOT NULL CHECK (action IN ('plan', 'apply')),
    source      text NOT NULL,
    partly      boolean NOT NULL DEFAULT false,
    state       text NOT NULL DEFAULT 'waiting'
                CHECK (state IN ('waiting', 'working', 'done', 'refused')),
    asked_by    text NOT NULL DEFAULT session_user,
    asked_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    answered_at timestamptz,
    revision    bigint,
    changes     jsonb,
    result      text,
    fix         text
);

COMMENT ON TABLE walbrook.config_requests IS 'Requests to plan or to apply the configuration file of a running service, with what became of them; the latest 1000.';
COMMENT ON COLUMN walbrook.config_requests.source IS 'A database of the service that is meant.';
COMMENT ON COLUMN walbrook.config_requests.partly IS 'Whether changes that need a restart of the service are left out; else they refuse the whole.';
COMMENT ON COLUMN walbrook.config_requests.state IS 'refused: nothing was changed, and result says why.';
COMMENT ON COLUMN walbrook.config_requests.revision IS 'Of walbrook.configurations: what runs since then.';
COMMENT ON COLUMN walbrook.config_requests.changes IS 'What differs between the file and what runs, and how each change takes effect.';
COMMENT ON COLUMN walbrook.config_requests.result IS 'The same, or what is wrong, for people.';

-- ------------------------------------------------------------------------------------------------
-- Live traces: what a consumer's expressions make of its changes, for a bounded time.
-- Samples have row values in them, so both tables are unlogged, and a trace takes its samples along.
CREATE UNLOGGED TABLE walbrook.live_traces (
    id         uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    consumer   integer NOT NULL REFERENCES walbrook.consumers (id) ON DELETE CASCADE,
    per_second integer NOT NULL CHECK (per_second BETWEEN 1 AND 100),
    begun_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    ends_at    timestamptz NOT NULL
);

CREATE INDEX live_traces_consumer ON walbrook.live_traces (consumer);

CREATE UNLOGGED TABLE walbrook.live_samples (
    number  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    trace   uuid NOT NULL REFERENCES walbrook.live_traces (id) ON DELETE CASCADE,
    sample  text NOT NULL
);

CREATE INDEX live_samples_trace ON walbrook.live_samples (trace, number);

COMMENT ON TABLE walbrook.live_traces IS 'Who is being watched, and until when. A row is removed when its time is over, with its samples.';
COMMENT ON COLUMN walbrook.live_traces.id IS 'Who has this id may fetch the samples; no other is shown them.';
COMMENT ON TABLE walbrook.live_samples IS 'Samples that were not fetched yet, row values included; fetching removes them.';
COMMENT ON COLUMN walbrook.live_samples.sample IS 'JSON: the cursor, what the expressions saw, what they made of it, and whether it passed.';

-- ------------------------------------------------------------------------------------------------
-- What functions take and return.

CREATE TYPE walbrook.received AS (
    ack_id       text,
    deliveries   integer,
    lease_until  timestamptz,
    commit_lsn   pg_lsn,
    commit_idx   bigint,
    table_schema text,
    table_name   text,
    action       text,
    message      json
);

CREATE TYPE walbrook.consumer_state AS (
    source       text,
    consumer     text,
    "cursor"     text,
    paused_at    timestamptz,
    waiting      bigint,
    dead_letters bigint,
    affected     bigint,
    state        text,
    state_reason text,
    generation   integer
);

COMMENT ON TYPE walbrook.consumer_state IS 'A consumer after an operator''s act: its cursor, how many messages wait in its queue, how many dead letters it has (10000 stands for 10000 or more), and how many messages the act moved or gave up.';

CREATE TYPE walbrook.place AS (lsn pg_lsn, idx bigint);
