"""The Spark stage: the only place that imports pyspark.

``source`` shows the log to Spark and decodes it in partitions, ``exchange`` carries decoded slices
past the JVM, ``reorder`` puts them back in order by their markers, ``delivery`` hands them to sinks
on the executors, ``lane`` is the streaming query that drives all of it and settles.
"""
