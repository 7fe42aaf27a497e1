"""Windows over event time: which are due, their rows, and the Spark query that aggregates them."""
