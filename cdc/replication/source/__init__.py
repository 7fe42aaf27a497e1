"""The source beside the stream: slot, identity, catalog, heartbeats."""
