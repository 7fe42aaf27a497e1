"""The Spark side: the only place that imports pyspark.

``jvm`` and ``session`` start Spark. ``source`` shows the log to Spark and decodes it in partitions,
``slices`` are what it leaves behind. ``feed`` restores their order by their markers and holds the
ranges at the head of the log. ``workers`` serve one consumer each and settle, ``stage`` runs all of
them for one source; ``delivery`` is how a range reaches a sink, ``capacity`` how much of that
happens at once. ``expressions``, ``eventtime``, ``backfill`` and ``verify`` are steps of a worker.
"""
