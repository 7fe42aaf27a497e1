"""The reader and all that speaks with the source, on real Postgres servers."""
