"""What Spark 4.2 writes to in tests: Delta's connector, and the tables of Spark's own tests."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.maven_jars import Jar, fetched

SPARK: Final = "4.2.0"
DELTA: Final = "4.4.0"
_DELTA_PARTS = (
    "delta-spark_4.2_2.13", "delta-storage", "delta-kernel-api", "delta-kernel-defaults",
    "delta-kernel-unitycatalog",
)  # fmt: skip
_TABLES = Jar("org.apache.spark", "spark-catalyst_2.13", SPARK, alone=True, classifier="tests")


def delta_jars() -> list[Path]:
    """Delta's connector; what else it depends on, Spark has."""
    parts = [Jar("io.delta", name, DELTA, alone=True) for name in _DELTA_PARTS]
    return sorted(fetched(f"delta-spark-{DELTA}", parts).glob("*.jar"))


def row_level_tables() -> list[Path]:
    """A catalog of tables in memory that take row-level operations."""
    return sorted(fetched(f"spark-tables-{SPARK}", [_TABLES]).glob("*.jar"))
