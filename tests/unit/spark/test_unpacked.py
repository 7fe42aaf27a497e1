"""PySpark is imported from its folder where there is one."""

from __future__ import annotations

from pathlib import Path

from spark_pipeline.session.unpacked import without_archives


def test_the_archives_of_a_package_that_can_be_imported_are_left_out(tmp_path: Path) -> None:
    package = tmp_path / "pyspark"
    package.mkdir()
    (package / "__init__.py").touch()
    archives = [str(package / "python" / "lib" / name) for name in ("pyspark.zip", "py4j-src.zip")]
    assert without_archives([*archives, "/app", str(tmp_path)]) == ["/app", str(tmp_path)]
    elsewhere = [*archives, "/app"]
    assert without_archives(elsewhere) == elsewhere, "the package cannot be imported"


def test_the_archives_of_a_spark_without_a_package_stay(tmp_path: Path) -> None:
    path = [str(tmp_path / "spark" / "python" / "lib" / "pyspark.zip"), "/app/other.zip"]
    assert without_archives(path) == path
