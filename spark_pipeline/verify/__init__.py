"""Verify in the driver: the source and a consumer's destination are read and compared here.

``runner`` takes a consumer's verifications one after another; ``comparison`` compares one table;
``repair`` has the rows that differ delivered again.
"""
