"""Lets Spark find ``format("walbrook")``: it looks for modules of this prefix with this class."""

from spark_pipeline.source import WalbrookDataSource as DefaultSource

__all__ = ["DefaultSource"]
