"""The reader and databases that are not in UTF-8: texts arrive, and bad ones harm nobody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from cdc.decoding import decode_changes
from cdc.decoding.typed import decode_tables
from tests.fix_postgres import Database, fresh_database, on_both_versions
from tests.slot_source import SlotSource, make_slot_source

pytestmark = [pytest.mark.migrated, on_both_versions]


def _records(source: SlotSource) -> list[str | None]:
    view = source.view
    frames = list(view.frames(view.first_batch(), view.next_batch()))
    changes = [c for f in frames for c in decode_changes(f.raw, f.schemas).to_pylist()]
    return [change["record"] for change in changes]


@pytest.mark.parametrize(
    ("encoding", "word"),
    # In Latin 1 the second has the bytes of an é in UTF-8: it would pass as that unnoticed.
    [("LATIN1", "Grüße"), ("LATIN1", "Ã©"), ("EUC_JP", "日本語")],
)
def test_texts_in_another_encoding_are_read_as_utf8(
    database: Database, tmp_path: Path, encoding: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    with fresh_database(database.dsn, encoding) as other:
        other.execute(f'CREATE TABLE item (id int PRIMARY KEY, "{word}" text)')
        source = make_slot_source(other, tmp_path)
        # As a user gives it: without a word about encodings.
        plain = make_conninfo(database.dsn, dbname=other.name)
        source.settings = replace(source.settings, dsn=plain, state_dsn=plain)
        with source.reading():
            other.execute(f"INSERT INTO item VALUES (1, '{word}')")
            source.until_logged(1)
        assert _records(source) == [f'{{"id":1,"{word}":"{word}"}}']


def test_a_text_that_is_not_utf8_does_not_end_the_stream(
    database: Database, tmp_path: Path
) -> None:
    with fresh_database(database.dsn, "SQL_ASCII") as other:
        utf8 = replace(other, dsn=make_conninfo(other.dsn, client_encoding="UTF8"))
        other.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
        source = make_slot_source(utf8, tmp_path)
        with source.reading():
            other.execute("INSERT INTO item VALUES (1, 'a')")
            other.execute("INSERT INTO item VALUES (2, convert_from('\\xff', 'SQL_ASCII'))")
            other.execute("INSERT INTO item VALUES (3, 'b')")
            source.until_logged(3)
        assert _records(source) == ['{"id":1,"name":"a"}', None, '{"id":3,"name":"b"}']


def test_a_text_that_has_no_form_in_utf8_harms_only_its_row(
    database: Database, tmp_path: Path
) -> None:
    with fresh_database(database.dsn, "WIN1252") as other:
        other.execute('CREATE TABLE "Stück" (id int PRIMARY KEY, "größe" text)')
        source = make_slot_source(other, tmp_path)
        with source.reading():
            other.execute("""INSERT INTO "Stück" VALUES (1, 'weiß €')""")
            # A byte that this encoding leaves undefined; Postgres stores it all the same.
            other.execute("""INSERT INTO "Stück" VALUES (2, convert_from('\\x81', 'WIN1252'))""")
            other.execute("""INSERT INTO "Stück" VALUES (3, 'heiß €')""")
            source.until_logged(3)
        view = source.view
        frames = list(view.frames(view.first_batch(), view.next_batch()))
        changes = [c for f in frames for c in decode_changes(f.raw, f.schemas).to_pylist()]
        typed = [
            row
            for f in frames
            for t in decode_tables(f.raw, f.schemas)
            for row in t.rows.to_pylist()
        ]
    assert [change["record"] for change in changes] == [
        '{"id":1,"größe":"weiß €"}', None, '{"id":3,"größe":"heiß €"}',
    ]  # fmt: skip
    assert "of table public.Stück, column 'größe': this value is not CP1252" in changes[1]["error"]
    assert [change["record_pks"] for change in changes] == ['["1"]', '["2"]', '["3"]']
    assert [row["record"] and row["record"]["größe"] for row in typed] == ["weiß €", None, "heiß €"]
