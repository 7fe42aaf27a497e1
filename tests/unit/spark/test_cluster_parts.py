"""The parts of the cluster plan that need no cluster."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from cdc.cursor import Cursor
from cdc.decoding.format import PLAIN, ValueFormat, Wanted
from cdc.log.flight.wire import CA_VARIABLE, TOKEN_VARIABLE
from cdc.log.writer import LogWriter
from cdc.replication.wire.seal import Sealer
from spark_pipeline.feed.cluster import cluster_options, executor_environment, is_cluster, rows_of
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.slices.exchange import SliceMarker
from spark_pipeline.source.marked_rows import MARKER, marked, marked_schema, markers_in
from spark_pipeline.source.range_reader import LogPartition
from spark_pipeline.source.slicing import cut
from spark_pipeline.source.stream import WalbrookDataSource
from tests import pgoutput
from tests.unit.config.config_texts import databases, read
from tests.wire_messages import transaction, wire

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
BATCHES, ROWS = 6, 40


@pytest.fixture
def log(tmp_path: Path) -> Path:
    writer, sealer = LogWriter(tmp_path / "log"), Sealer()
    sealer.seal(wire(ITEM, *transaction(1)))
    for number in range(1, BATCHES + 1):
        rows = [pgoutput.insert(1, [str(number * 100 + i), "n"]) for i in range(ROWS)]
        sealed = sealer.seal(wire(*transaction(number * 100, *rows)))
        assert sealed is not None
        writer.append(sealed.raw, sealed.schemas, first=sealed.first, high=sealed.high)
    writer.close()
    return tmp_path / "log"


def read_marked(log: Path, partitions: int, wanted: Wanted = PLAIN) -> list[pa.RecordBatch]:
    """What partitions of all of the log yield where rows go through Spark."""
    options = {"path": str(log), "markers": "true", "wanted": wanted.to_text()}
    source = WalbrookDataSource(options)
    reader = source.streamReader(source.schema())
    parts = [LogPartition(0, BATCHES, 0, s) for s in cut(0, [ROWS] * BATCHES, partitions)]
    return [batch for part in parts for batch in reader.read(part)]


def test_a_partition_yields_its_rows_and_then_the_markers_of_all_its_slices(log: Path) -> None:
    wanted = Wanted((ValueFormat(), ValueFormat("postgres", "string")), before=True)
    batches = read_marked(log, 4, wanted)
    assert {batch.schema for batch in batches} == {marked_schema(wanted.schema)}
    table = pa.Table.from_batches(batches)
    assert table.column(MARKER).null_count == BATCHES * ROWS
    markers = markers_in(table.filter(table.column(MARKER).is_valid()).select([MARKER]))
    assert sum(marker.rows for marker in markers) == BATCHES * ROWS
    assert {(marker.path, marker.range_end) for marker in markers} == {("", BATCHES)}
    assert [m.offset for m in markers if m.batch_idx == 1] == [0, 20]


def test_an_empty_partition_still_says_what_it_is() -> None:
    one = SliceMarker(0, 1, 0, 0, 1, 0, Cursor(7, 0), 0, "", 0, 0)
    nothing = pa.RecordBatch.from_pylist([], schema=PLAIN.schema)
    table = pa.Table.from_batches(marked([([one], nothing)], PLAIN.schema))
    assert markers_in(table.select([MARKER])) == [one]


def test_slices_are_decoded_again_from_the_log_whichever_they_are(log: Path) -> None:
    table = pa.Table.from_batches(read_marked(log, 4))
    markers = markers_in(table.filter(table.column(MARKER).is_valid()).select([MARKER]))
    everything = table.filter(table.column(MARKER).is_null()).select(PLAIN.schema.names)
    again = pa.Table.from_batches(rows_of(log, 0, PLAIN, markers))
    assert again.to_pydict() == everything.to_pydict()
    some = [marker for marker in markers if marker.batch_idx in (1, 2, 4)][1:]
    chosen = pa.Table.from_batches(rows_of(log, 0, PLAIN, some))
    assert chosen.column("commit_lsn").to_pylist() == [200] * 20 + [300] * 40 + [500] * 40
    assert list(rows_of(log, 0, PLAIN, [])) == []


@pytest.mark.parametrize(
    ("master", "cluster"),
    [("local", False), ("local[*]", False), ("local-cluster[2,1,512]", True), ("yarn", True)],
)
def test_a_local_cluster_is_a_cluster(master: str, cluster: bool) -> None:
    assert is_cluster(master) is cluster


def test_executors_learn_where_the_log_is_and_with_what_to_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "t")
    flight = "host: 0.0.0.0, advertise: driver.example, port: 7400, ca_file: /etc/ca.pem"
    text = databases() + (
        "spark: {master: 'spark://m:7077'}\n"
        f"log: {{flight: {{{flight}, certificate: a.pem, private_key: a.key}}}}\n"
    )
    config = read(text)
    assert config.serves_log
    database = config.databases[0]
    assert cluster_options(config, database) == {
        "markers": "true",
        "executorPath": f"grpc+tls://driver.example:7400/{database.name}",
    }
    assert executor_environment(config) == {TOKEN_VARIABLE: "t", CA_VARIABLE: "/etc/ca.pem"}
    assert StageSettings.of(config, database, 1).cluster_options is not None
