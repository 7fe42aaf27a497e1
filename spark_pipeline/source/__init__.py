"""The Python data source ``walbrook``: offsets, slices, and reading ranges of the log as rows."""

from spark_pipeline.source.stream import WalbrookDataSource

__all__ = ["WalbrookDataSource"]
