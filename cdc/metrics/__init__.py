"""Measures taken where the work is done, and their way to ``/metrics``.

Each process counts in memory, a few additions per batch or range and never per row, and writes what
it has counted to a file of its own every two seconds. The supervisor, which made the folder of
these files, reads them when ``/metrics`` is asked for. No database takes part.
"""
