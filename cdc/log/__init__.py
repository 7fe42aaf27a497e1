"""The change log: append-only segments between the slot and everything that reads from it.

A segment is a file of frames; a frame is one sealed batch, checksummed and readable alone; beside
each segment stands an index with one entry a batch. One process writes (``writer``), any number
map the files (``view``). A batch exists for readers once its index entry does.
"""
