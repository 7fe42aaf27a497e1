"""The core of Walbrook, in the order a change passes through it.

``replication`` reads the slot, ``log`` keeps what was read, ``decoding`` turns bytes into columns,
``state`` holds every position as rows in Postgres, ``service`` is what operators start. Nothing in
here imports Spark or a sink.
"""
