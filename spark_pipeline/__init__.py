"""The Spark stage: the only place that imports pyspark.

``session`` starts Spark. ``source`` shows the log to Spark and decodes it in partitions. ``feed``
restores the order of decoded slices by their markers and holds the ranges at the head of the log.
``workers`` serve one consumer each and settle; ``delivery`` is how a range reaches a sink,
``capacity`` how much of that happens at once. ``expressions`` and ``eventtime`` are steps of a
worker.
"""
