"""The command ``walbrook``."""
