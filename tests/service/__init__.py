"""Whole processes: the service, the command line, the demo."""
