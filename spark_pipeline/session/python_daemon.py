"""The process that Spark forks its Python workers from, with the modules of their work imported.

A worker that imports them itself takes two thirds of a second of CPU before its first task, and
keeps a copy of its own in memory. Invariant: the modules start no Python thread and open no
connection when they are imported, so a fork holds nothing that two processes could share. NumPy and
Arrow have native threads by then, which they make again in a fork.
"""

from __future__ import annotations

import gc

from spark_pipeline.session.unpacked import import_unpacked

import_unpacked()

import pyspark.daemon  # noqa: E402
import pyspark.worker  # noqa: E402

import spark_pipeline.delivery.deliver  # noqa: E402
import spark_pipeline.expressions.evaluate  # noqa: E402
import spark_pipeline.source.stream  # noqa: E402, F401

if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # a collection in a worker leaves these pages shared
    pyspark.daemon.manager()
