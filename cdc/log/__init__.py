"""The change log: append-only segments between the slot and everything that reads from it.

A segment is a file of frames; a frame is one sealed batch, checksummed and readable alone; beside
each segment stands an index with one entry per batch, and the manifest lists the segments that are
sealed. One process writes (``writer``), any number read (``view``), here or elsewhere (``open``). A
batch exists for readers once its index entry does, and for Postgres once it is synced (``sync``).
"""
