"""Reading the slot: one connection, one process, one writer of the log.

``reader`` owns the loop and its promises, ``stream`` the socket, ``log_keeper`` the log and what
may be confirmed, ``state_link`` the state database. ``wire`` turns messages into numbered columns,
``spill`` keeps the rows of transactions that have not ended, ``source`` asks who answers and
watches the slot, ``preflight`` asks everything of a source before a reader starts.
"""
