"""A small shop on servers of our own: what ``walbrook run`` shows without a configuration.

Here are its schema, the customers that keep it busy, and the check that everything they did
arrived. The pipeline knows nothing of this room; nothing but tests and benchmarks may import it,
besides the command line.
"""
