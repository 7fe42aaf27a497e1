"""What became of one change: its row in the log, the records of its delivery, and what SQL knows.

Invariant: nothing here shows a value of a row, but for a payload that was asked for.
"""
