"""The schema ``walbrook``, applied by ``cdc.state.migrate``.

``0001_baseline.sql`` has tables, types and indexes. A file that was released never changes; what
comes later goes into a new number. ``functions`` and ``views`` have one definition of each, which
is changed in its place. ``schema.txt`` shows what all of them together give.
"""
