"""Reading the slot: one connection, one process, one writer of the log.

``protocol`` and ``seal`` are pure: bytes in, values out. ``stream`` owns the socket, ``reader`` the
loop and its promises, ``preflight`` the questions asked of a source before anything starts.
"""
