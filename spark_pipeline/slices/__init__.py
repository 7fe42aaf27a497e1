"""Decoded slices between the task that decoded them and those that deliver."""
