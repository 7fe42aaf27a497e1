"""``walbrook log``: a person sees what is in the log, what is damaged, and what passed."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from cdc.cursor import Cursor
from cdc.decoding.catalog import CatalogNote
from cdc.errors import OperatorError
from cdc.log.recovery.verify import LogVerification
from cdc.log.retention import Retention
from cdc.log.segment import index_path, read_entries
from cdc.log.tier.tier import TierSettings
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.replication.wire.seal import Sealer
from cdc.service.cli.log import log_app
from cdc.service.cli.log_listing import describe_log
from tests import pgoutput
from tests.unit.replication.annotated import clear_annotation, set_annotation
from tests.waiting import until

ROOT = Path(__file__).parents[3]
ORDERS, ITEMS = 16400, 16500
COMMIT_US = 1_767_225_600_000_001  # 2026-01-01T00:00:00.000001Z
INT8, TEXT, NUMERIC = 20, 25, 1700
KEEP_ALL = Retention(settled_s=1e9, settled_bytes=1 << 40, bytes_max=1 << 40, on_full="pause")


@dataclass
class Shop:
    """A log as the reader writes it, with its configuration; one transaction a batch."""

    directory: Path
    config: Path
    writer: LogWriter
    sealer: Sealer

    def commit(self, lsn: int, *messages: bytes) -> None:
        begin = pgoutput.begin(lsn, COMMIT_US + lsn, 700 + lsn)
        transaction = [begin, *messages, pgoutput.commit(lsn, lsn + 1, COMMIT_US)]
        header = struct.pack(">cQQq", b"w", lsn, lsn, 0)
        sealed = self.sealer.seal([header + message for message in transaction])
        assert sealed is not None
        self.writer.append(
            sealed.raw,
            sealed.schemas,
            first=sealed.first,
            high=sealed.high,
            annotations=sealed.annotations,
        )

    def orders(self, *lsns: int) -> None:
        """One insert and one update of an order a transaction."""
        for lsn in lsns:
            self.commit(
                lsn,
                pgoutput.insert(ORDERS, [str(lsn), "new", "12345678901234567890.10"]),
                pgoutput.update(ORDERS, [str(lsn), "paid", pgoutput.UNCHANGED]),
            )

    def run(self, *arguments: str) -> Result:
        command, *rest = arguments
        return CliRunner().invoke(log_app, [command, "--config", str(self.config), *rest])

    def changes(self, *arguments: str) -> list[dict[str, object]]:
        result = self.run("cat", *arguments)
        assert result.exit_code == 0, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]

    def segments(self) -> list[Path]:
        return sorted(self.directory.glob("*.seg"))


def configuration(folder: Path, *names: str) -> Path:
    databases = [
        {
            "name": name,
            "url": "postgres://nobody@127.0.0.1:1/none",
            "slot": {"name": "s"},
            "publication": {"name": "p"},
        }
        for name in names
    ]
    path = folder / "walbrook.yaml"
    path.write_text(yaml.safe_dump({"databases": databases, "log": {"directory": "log"}}))
    return path


def open_shop(folder: Path, tier: TierSettings | None = None) -> Shop:
    directory = folder / "log" / "shop"
    writer = LogWriter(directory, term=3, limits=SegmentLimits(bytes=5_000), tier=tier)
    sealer = Sealer(catalog_of=lambda _relation, _xid: CatalogNote(("id",)))
    shop = Shop(directory, configuration(folder, "shop"), writer, sealer)
    columns: list[pgoutput.ColumnSpec] = [("id", INT8, True), ("state", TEXT), ("total", NUMERIC)]
    shop.commit(
        10,
        pgoutput.relation(ORDERS, "public", "orders", columns),
        pgoutput.relation(ITEMS, "public", "items", [("id", INT8, True)]),
        pgoutput.insert(ITEMS, ["9007199254740993"]),
        pgoutput.delete(ITEMS, key=["7"]),
        pgoutput.logical_message("note", b"hello"),
    )
    return shop


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = open_shop(tmp_path)
    with closing(shop.writer):
        yield shop


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def test_ls_shows_bounds_and_segments_the_active_one_last(shop: Shop) -> None:
    shop.orders(*range(20, 60))
    shop.writer.retain(Cursor(30, 0), Retention(0, 0, 1 << 40, "pause"))
    manifest = shop.writer.manifest
    listed = json.loads(shop.run("ls", "--json").stdout)
    assert (listed["source"], listed["term"], listed["history"]) == ("shop", 3, manifest.history)
    assert listed["earliest"] == str(manifest.earliest) != "0/0:0"
    assert listed["evicted"] == "0/0:0"
    assert (listed["end"], listed["next_batch"]) == ("0/3B:2", 41)
    *sealed, active = listed["segments"]
    assert [segment["first_batch"] for segment in sealed] == [
        info.first_batch for info in manifest.segments
    ]
    assert all(segment["sealed_at"] and segment["tier"] == "hot" for segment in sealed)
    assert active["sealed_at"] is None
    assert active["first_batch"] == manifest.next_batch
    assert active["batches"] == 41 - manifest.next_batch
    assert active["commit_to"] == "2026-01-01T00:00:00+00:00"
    assert listed["bytes"] == shop.writer.size_bytes


def test_ls_says_how_far_the_log_is_on_disk(shop: Shop) -> None:
    shop.orders(20)
    shop.writer.close()
    assert json.loads(shop.run("ls", "--json").stdout)["durable_end"] == "0/14:2"
    shop.writer = LogWriter(shop.directory, term=3)


def test_ls_prints_a_table_for_people(shop: Shop) -> None:
    shop.orders(*range(20, 60))
    result = shop.run("ls")
    assert result.exit_code == 0
    assert "durable end" in result.stdout
    assert result.stdout.splitlines()[-2].split()[-2] == "active"


def test_a_whole_log_verifies_and_is_summed_up(shop: Shop) -> None:
    shop.orders(*range(20, 60))
    result = shop.run("verify")
    assert result.exit_code == 0, result.output
    segments = len(shop.writer.manifest.segments) + 1
    assert result.stdout == (
        f"shop: {segments} segments, 41 batches, 83 rows, {shop.writer.size_bytes} bytes "
        "verified, no damages\n"
    )


def test_every_damage_is_named_with_its_file_byte_batch_and_cursors(shop: Shop) -> None:
    shop.orders(*range(20, 60))
    first, second = shop.writer.manifest.segments[:2]
    _batch, offset, size, *_ = read_entries(index_path(shop.directory, first.name), 1, 2)[0]
    flip(shop.directory / f"{first.name}.seg", offset + size - 100)
    flip(shop.directory / f"{second.name}.idx", 8)
    active = shop.segments()[-1]
    flip(active, active.stat().st_size - 100)
    result = shop.run("verify")
    assert result.exit_code == 1
    frame, index, last = result.stdout.splitlines()
    assert frame == (
        f"{first.name}.seg, byte {offset}, batch 1, cursors 0/14:0 to 0/14:2: "
        "the frame does not match its checksum"
    )
    assert index == (
        f"{second.name}.idx, batch {second.first_batch}, cursors {second.first} to "
        f"{second.high}: the index does not match its checksum"
    )
    assert last.startswith(f"{active.name}, byte ")
    assert "batch 40, cursors 0/3B:0 to 0/3B:2: the frame does not match" in last
    assert "41 batches" in result.stderr, "everything was looked at"
    assert "3 damages" in result.stderr


def test_a_damaged_manifest_does_not_hide_the_damaged_frame_behind_it(shop: Shop) -> None:
    shop.orders(*range(20, 60))
    flip(shop.directory / "manifest.json", 60)
    flip(shop.segments()[1], 150)
    result = shop.run("verify")
    assert result.exit_code == 1
    manifest, frame = result.stdout.splitlines()
    assert manifest.startswith("manifest.json: ")
    assert frame.startswith(f"{shop.segments()[1].name}, byte 0, batch ")
    assert "41 batches" in result.stderr


def test_a_segment_that_is_cut_off_or_missing_is_damage(shop: Shop) -> None:
    shop.orders(*range(20, 60))
    first, second = shop.segments()[:2]
    os.truncate(first, first.stat().st_size - 1)
    second.unlink()
    cut, missing = shop.run("verify").stdout.splitlines()
    assert cut.startswith(first.name)
    assert "the file ends here; batches missing: 1" in cut
    assert missing.startswith(second.stem)
    assert "a file is missing" in missing


def test_cold_segments_are_verified_too_unless_left_out(tmp_path: Path) -> None:
    shop = open_shop(tmp_path, TierSettings(str(tmp_path / "cold"), hot_bytes=0))
    with closing(shop.writer):
        shop.orders(*range(20, 60))

        def moved() -> bool:
            shop.writer.retain(Cursor(0, 0), KEEP_ALL)
            return all(info.place for info in shop.writer.manifest.segments)

        until("segments in the tier", moved)
        assert shop.run("verify").exit_code == 0
        tiers = {
            segment["tier"] for segment in json.loads(shop.run("ls", "--json").stdout)["segments"]
        }
        assert tiers == {"hot", "cold"}
        cold = sorted((tmp_path / "cold").rglob("*.seg"))
        flip(cold[0], 150)
        result = shop.run("verify")
        assert result.exit_code == 1
        assert result.stdout.startswith(f"{cold[0].name}, byte 0, batch 0, cursors 0/A:0 to 0/A:3")
        left_out = shop.run("verify", "--hot-only")
        assert left_out.exit_code == 0
        assert f"{len(cold)} cold segments left out" in left_out.stdout


def test_a_log_that_is_written_trimmed_and_moved_meanwhile_is_whole(tmp_path: Path) -> None:
    shop = open_shop(tmp_path, TierSettings(str(tmp_path / "cold"), hot_bytes=20_000))
    ended = threading.Event()

    def write() -> None:
        retention = Retention(1e9, 40_000, 1 << 40, "pause")
        for lsn in range(20, 100_000):
            shop.orders(lsn)
            shop.writer.retain(shop.writer.end, retention)
            if ended.is_set():
                return

    with closing(shop.writer):
        thread = threading.Thread(target=write)
        thread.start()
        try:
            until("trimming", lambda: shop.writer.manifest.earliest > Cursor(30, 0))
            for _ in range(10):
                assert [str(damage) for damage in LogVerification(shop.directory).run()] == []
                listed = describe_log("shop", shop.directory)["segments"]
                firsts = [segment["first_batch"] for segment in listed]
                ends = [segment["first_batch"] + segment["batches"] for segment in listed]
                assert firsts[1:] == ends[:-1]
        finally:
            ended.set()
            thread.join()

        def tiers() -> set[str]:
            shop.writer.retain(Cursor(0, 0), KEEP_ALL)
            segments = describe_log("shop", shop.directory)["segments"]
            return {segment["tier"] for segment in segments}

        until("segments in both tiers", lambda: tiers() == {"hot", "cold"})


def test_cat_prints_changes_as_they_were_decoded(shop: Shop) -> None:
    shop.orders(20)
    inserted, deleted, message, _order, paid = shop.changes()
    assert inserted == {
        "cursor": "0/A:0",
        "commit_timestamp": "2026-01-01T00:00:00.000011Z",
        "xid": 710,
        "table": "public.items",
        "action": "insert",
        "record": {"id": 9007199254740993},
        "changes": None,
        "record_pks": ["9007199254740993"],
        "unchanged": None,
    }
    assert (deleted["action"], deleted["record_pks"]) == ("delete", ["7"])
    assert (message["action"], message["table"]) == ("message", None)
    assert '"total":12345678901234567890.10' in shop.run("cat").stdout, "no digit is lost"
    assert (paid["cursor"], paid["unchanged"]) == ("0/14:1", ["total"])


def test_cat_takes_a_range_of_cursors(shop: Shop) -> None:
    shop.orders(*range(20, 60))
    cursors = [change["cursor"] for change in shop.changes("--from", "0/1E:1", "--to", "0/20:1")]
    assert cursors == ["0/1E:1", "0/1F:0", "0/1F:1", "0/20:0"]
    assert shop.changes("--from", "0/3B")[0]["cursor"] == "0/3B:0"
    assert len(shop.changes("--from", "earliest", "--limit", "7")) == 7
    assert shop.changes("--from", "FF/0") == []


def test_cat_chooses_tables_and_actions(shop: Shop) -> None:
    shop.orders(20, 21)
    items = shop.changes("--table", "public.items")
    assert [change["action"] for change in items] == ["insert", "delete"]
    both = shop.changes("-t", "public.items", "-t", "public.orders", "--action", "insert")
    assert [change["table"] for change in both] == ["public.items", *["public.orders"] * 2]
    assert shop.changes("-t", "public.none") == []
    assert len(shop.changes("-a", "message", "-a", "delete")) == 2
    result = shop.run("cat", "--table", "items")
    assert isinstance(result.exception, OperatorError)
    assert "public.items" in str(result.exception)


def test_cat_prints_messages_as_they_came(shop: Shop) -> None:
    raw = shop.changes("--raw", "--table", "public.items")[0]
    assert (raw["kind"], raw["relation"]) == ("I", ITEMS)
    assert bytes.fromhex(str(raw["payload"])) == pgoutput.insert(ITEMS, ["9007199254740993"])


def test_cat_shows_annotations_where_there_are_any_whatever_is_chosen(shop: Shop) -> None:
    shop.commit(
        20,
        pgoutput.insert(ITEMS, ["1"]),
        set_annotation(b'{"n": 12345678901234567890.10}'),
        pgoutput.insert(ORDERS, ["2", "new", "1"]),
        pgoutput.insert(ITEMS, ["3"]),
        clear_annotation(),
        pgoutput.insert(ITEMS, ["4"]),
    )

    def shown(*arguments: str) -> dict[object, bool]:
        changes = shop.changes("--from", "0/14", *arguments)
        return {change["cursor"]: "annotations" in change for change in changes}

    assert shown("-a", "insert") == {
        "0/14:0": False, "0/14:3": True, "0/14:4": True, "0/14:6": False,
    }  # fmt: skip
    assert shown("-t", "public.items") == {"0/14:0": False, "0/14:4": True, "0/14:6": False}
    assert shown("-a", "message") == {"0/14:1": False, "0/14:5": False}
    printed = shop.run("cat", "--from", "0/14:3", "--limit", "1").stdout
    assert '"annotations":{"n": 12345678901234567890.10}' in printed, "no digit is lost"


def test_cat_goes_on_behind_a_batch_that_cannot_be_read(shop: Shop) -> None:
    shop.commit(20, b"I" + (ORDERS).to_bytes(4, "big") + b"N\x00\x03broken")
    shop.orders(21)
    result = shop.run("cat", "--from", "0/14")
    assert result.exit_code == 1
    assert [json.loads(line)["cursor"] for line in result.stdout.splitlines()] == [
        "0/15:0",
        "0/15:1",
    ]
    assert result.stderr.startswith("walbrook: batch 1: ")
    assert len(shop.changes("--raw", "--from", "0/14")) == 3, "undecoded it can be looked at"


def test_cat_goes_on_behind_a_damaged_index(shop: Shop) -> None:
    shop.orders(*range(20, 60))
    damaged = shop.writer.manifest.segments[1]
    flip(shop.directory / f"{damaged.name}.idx", 8)
    result = shop.run("cat")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == damaged.batches
    assert len(result.stdout.splitlines()) == 83 - damaged.rows


def test_cat_says_when_the_beginning_is_gone(shop: Shop) -> None:
    shop.orders(*range(20, 60))
    shop.writer.retain(Cursor(40, 0), Retention(0, 0, 1 << 40, "pause"))
    earliest = shop.writer.manifest.earliest
    result = shop.run("cat", "--from", "0/10:0", "--limit", "1")
    assert result.exit_code == 0
    assert f"changes below {earliest} are no longer in the log" in result.stderr
    assert not shop.run("cat", "--limit", "1").stderr


def test_several_databases_need_a_choice(shop: Shop) -> None:
    shop.config = configuration(shop.config.parent, "shop", "office")
    for command in ("ls", "verify", "cat"):
        error = shop.run(command).exception
        assert isinstance(error, OperatorError)
        assert "--source, one of shop, office" in str(error)
        assert shop.run(command, "--source", "shop").exit_code == 0
        assert "no log in" in str(shop.run(command, "--source", "office").exception)
        assert "no database 'none'" in str(shop.run(command, "--source", "none").exception)


def walbrook_log(shop: Shop, *arguments: str) -> subprocess.Popen[str]:
    code = "from cdc.service.cli.log import log_app; log_app()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--config", str(shop.config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_cat_follows_the_log_as_it_grows(shop: Shop) -> None:
    with walbrook_log(shop, "cat", "--follow", "--from", "0/14") as process:
        assert process.stdout is not None
        for lsn in (20, 21):
            shop.orders(lsn)
            found = [json.loads(process.stdout.readline())["cursor"] for _ in range(2)]
            assert found == [f"0/{lsn:X}:0", f"0/{lsn:X}:1"]
        process.send_signal(2)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


def test_cat_ends_quietly_when_its_reader_has_enough(shop: Shop) -> None:
    shop.commit(20, *(pgoutput.insert(ITEMS, [str(number)]) for number in range(20_000)))
    with walbrook_log(shop, "cat") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 0
