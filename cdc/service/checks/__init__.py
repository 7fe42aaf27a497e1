"""Whether a configuration fits its databases: ``walbrook config check``."""
