"""Event time on Spark: what is counted and summed over windows of it."""
