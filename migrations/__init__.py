"""Numbered SQL files, applied in order, each once, by ``cdc.state.migrate``.

A file that was released never changes; what comes later goes into a new one.
"""
