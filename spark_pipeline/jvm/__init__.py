"""The JVM under Spark: its start, its output, rows across its border."""
