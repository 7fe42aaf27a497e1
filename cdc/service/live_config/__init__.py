"""The configuration of a running service: planned, applied, and what that changes outside of it.

``plan`` compares the file with what runs, ``applier`` applies a plan, ``publications`` and
``new_tables`` are about the tables of sources, ``file`` has the text and the copy that the
processes of the service read.
"""
