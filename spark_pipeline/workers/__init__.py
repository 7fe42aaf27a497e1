"""Workers: one per consumer, each with a cursor, and the settler that writes their cursors.

``base`` is the loop of every worker, ``inputs`` where its ranges come from, ``retries`` its retry
queue, ``state`` what a worker is doing, ``context`` what the workers of a source share, ``settler``
writes one transaction for all of them.
"""
