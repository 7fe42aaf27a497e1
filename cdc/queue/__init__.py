"""The queue room: what is between a message and its being settled.

It owns the ledger of delivered cursors. What must always hold: what is recorded here may cost a
repeat when it is lost, never a message.
"""
