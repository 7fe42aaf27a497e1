"""``/health``, ``/metrics`` and the API."""
