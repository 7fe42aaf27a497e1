"""Verify: whether a destination holds the rows that its source holds.

This room owns what a destination says that it holds (``held``), how the rows of both sides are laid
side by side in bounded memory (``key_ranges``), how the source is read for it (``source_rows``),
and when a row counts as different while changes flow (``rounds``). It knows the source; it knows
no sink and no consumer.
"""
