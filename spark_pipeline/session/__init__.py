"""The Spark session: how it is started, and the check of expressions before anything runs."""
