"""What sinks share that have a table of their own for each table of the source. Pure.

``stretches`` cuts a batch into pieces in which each target has one version, ``fold`` leaves the
last change per key of such a piece, ``versions`` says what became of a table's columns between two
versions, and ``typed`` makes Arrow columns of the texts of rows.
"""
