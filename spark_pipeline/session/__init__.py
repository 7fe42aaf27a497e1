"""The Spark session: how it is started, which JVM it runs on, and what that JVM writes."""
