"""What sinks of one running service hold: one module per part, each with its own tables."""
