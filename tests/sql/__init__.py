"""State database and SQL functions, on a real Postgres."""
