"""Consumers in event-time order: read from the logs of their databases, held back, released.

Each is served by a thread of its own beside the lanes, for its order is not the log's. ``cdc``'s
``eventtime`` decides what is released when; here it is read, delivered and settled.
"""
