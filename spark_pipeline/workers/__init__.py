"""Workers: one per consumer, each with a cursor, and the settler that writes their cursors.

``worker`` serves one consumer, ``state`` says what it is doing, ``settler`` writes one transaction
for all of them, ``stage`` runs the workers and the feed of one source.
"""
