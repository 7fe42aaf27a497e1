"""What operators start: the command line, the supervisor, the embedded servers."""
