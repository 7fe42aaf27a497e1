"""What is between a message and its being settled: groups, retries, the ledger.

``groups`` are the unit of order, ``retry`` the pauses between deliveries, ``claims`` the messages
that are due, ``pull_consumers`` the Python side of consumers that fetch, ``ledger`` what was
accepted. Which message goes to which claimer is decided by SQL, in ``migrations``; the rows of
``walbrook.events`` are those of ``cdc.state.queued_messages``.
"""
