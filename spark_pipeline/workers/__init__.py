"""Workers: one per consumer, each with a cursor, and the settler that writes their cursors.

``base`` is the loop of every worker, ``inputs`` where its ranges come from, ``worker`` delivers in
commit order, ``state`` says what a worker is doing, ``settler`` writes one transaction for all of
them, ``feed_runner`` runs the query of the feed, ``stage`` all parts of one source.
"""
