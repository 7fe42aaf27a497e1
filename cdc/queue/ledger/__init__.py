"""The ledger of delivered cursors, and where it may be kept."""
