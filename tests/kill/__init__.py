"""What a service that is killed again and again must keep: one module per promise.

Each part has its own tables and sinks, so that all of them share one service and its kills.
"""
