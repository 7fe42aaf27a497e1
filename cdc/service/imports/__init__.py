"""Configuration files of other products, read as they are and written as ours.

What has no equivalent is a remark: where it stands, what it is, and what to do.
"""
