"""The core of Walbrook, in the order a change passes through it.

``replication`` reads the slot, ``log`` keeps what was read, ``decoding`` turns bytes into columns,
``queue`` has groups, retries and the ledger, ``eventtime`` watermarks, ``backfill`` and ``verify``
rows that exist already. ``state`` holds every position as rows in Postgres, ``config`` is the
configuration, ``service`` what operators start. Nothing in here imports Spark or a sink.
"""
