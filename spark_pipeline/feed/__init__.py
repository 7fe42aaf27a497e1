"""The feed of a source: ranges of the log, decoded once for all consumers that are at its head.

``query`` runs the streaming query, ``body`` is what ``foreachBatch`` calls, ``feed`` is the bounded
ring between the body and the workers, and ``decoded_range`` is what lies in it.
"""
