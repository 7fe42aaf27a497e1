"""The SQL behind every position: migrations, registration, settling, and what ``status`` shows."""
