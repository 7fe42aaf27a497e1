"""The HTTP API under ``/api``: a thin layer over the SQL functions."""
