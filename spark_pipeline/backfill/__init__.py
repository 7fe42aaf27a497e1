"""Backfill in the driver: chunks are planned and read here, and join a worker's stream in pieces.

``runner`` plans the chunks of a consumer's backfills and has them read, on executors when they are
large; ``pieces`` gives a piece of a chunk its place among the changes; ``piece`` is what a worker
delivers. Order, expressions, retries and settling are the worker's own, as for changes.
"""
