"""The processes of the service: prepared, started, kept running."""
