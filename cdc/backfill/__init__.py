"""Backfill: rows that exist already enter the stream of changes, while changes flow.

This room owns what a chunk of a table is (``ranges``), how it is read (``table``, ``query``,
``reading``), how its rows become raw messages of the kind ``R`` (``copy_rows``), and which of them
a newer change has overtaken (``snapshot``, ``open_transactions``, ``overtaken``). It knows the
source and the change log; it knows no consumer and no sink.
"""
