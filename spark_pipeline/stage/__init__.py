"""One source served: its feed, its consumers' workers, and what watches them.

``stage`` starts and ends all parts of one source, ``sources`` all stages. ``worker`` serves a
consumer in commit order, ``feed_runner`` runs the query of the feed, ``throttle`` acts on pressure,
``notifications`` hears of operators, ``status`` writes the states of workers.
"""
