"""The Spark stage: the only place that imports pyspark.

``source`` shows the log to Spark and decodes it in partitions, ``exchange`` carries decoded slices
past the JVM, ``reorder`` puts them back in order by their markers. ``feed`` holds decoded ranges at
the head of the log, ``workers`` deliver them, one per consumer, and settle.
"""
