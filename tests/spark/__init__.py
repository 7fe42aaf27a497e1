"""What runs on Spark, in the process of the test or on a cluster."""
