"""What operators start: the command line, HTTP, checks of a configuration, processes."""
