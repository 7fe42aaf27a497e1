"""pgoutput messages as columns, and what the log keeps of them. No I/O."""
