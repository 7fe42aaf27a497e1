"""From decoded rows to a sink: match, order, shape, send, and what became of it.

Invariant: nothing here imports pyspark.
"""
