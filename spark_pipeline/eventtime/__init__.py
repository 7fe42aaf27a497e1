"""Consumers in event-time order: a worker that holds changes back until their time has come.

``cdc.eventtime`` decides what is released when. Here ``worker`` serves such a consumer, ``reading``
takes the ranges of its inputs, ``ordering`` plans and settles releases, and ``sending`` delivers.
"""
