"""Benchmarks: one file a question, each with ``run()`` that returns its figures."""
