"""The queue room: what is between a message and its being settled.

It owns groups, the unit of order; the messages that wait in ``walbrook.events`` and the pauses
between their deliveries; the ledger of delivered cursors; and the Python side of pull consumers.
What decides who gets what is SQL, in ``migrations``.
"""
