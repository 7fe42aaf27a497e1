"""Benchmarks: one file per question, each with ``run`` that returns its figures.

``python -m benchmarks NAME`` runs one; docs/performance.md says what the fields mean. Every one
starts and stops servers of its own in a temporary directory.
"""
