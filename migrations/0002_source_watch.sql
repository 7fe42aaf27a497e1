-- What the watch over a source found out about its heartbeats.
ALTER TABLE walbrook.sources ADD COLUMN heartbeat_state text
    CHECK (heartbeat_state IN ('off', 'ok', 'none_recent', 'stale', 'lsn_advanced', 'nothing_received'));

COMMENT ON COLUMN walbrook.sources.heartbeat_state IS 'How heartbeats are doing. none_recent: none could be written for a while. stale: one is on its way for too long. lsn_advanced: the stream went past one without giving it. nothing_received: none has come back yet.';
