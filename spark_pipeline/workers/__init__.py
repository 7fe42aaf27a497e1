"""Workers: one per consumer, each with a cursor, and the settler that writes their cursors.

``worker`` serves one consumer, ``state`` says what it is doing, ``settler`` writes one transaction
for all of them, ``feed_runner`` runs the query of the feed, ``stage`` all parts of one source.
"""
