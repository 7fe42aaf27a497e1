"""Feed, workers and settler over hand-written logs, without Spark."""
