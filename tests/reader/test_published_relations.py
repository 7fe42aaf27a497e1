"""Tables as they are described before they change are tables as pgoutput describes them."""

from __future__ import annotations

from cdc.decoding.relation import Relation, parse_relation, with_catalog
from cdc.replication.source.catalog import describe
from cdc.replication.source.published import published_relations
from tests.fix_postgres import DEFAULT_VERSION, Database, on_both_versions

TABLES = """
CREATE SCHEMA "Odd Schema";
CREATE TYPE mood AS ENUM ('good', 'bad');
CREATE TYPE pair AS (a int, b text);
CREATE TABLE plain (id bigint PRIMARY KEY, amount numeric(10, 2), at timestamptz, tags text[]);
CREATE TABLE moody (a int, b mood, c pair, PRIMARY KEY (b, a));
CREATE TABLE whole (a int, b text); ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE by_index (a int NOT NULL, b text NOT NULL, c int);
CREATE UNIQUE INDEX by_index_b ON by_index (b);
ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_b;
CREATE TABLE derived (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, z int);
CREATE TABLE dropped (id int PRIMARY KEY, gone int, here varchar(7)); ALTER TABLE dropped DROP gone;
CREATE TABLE "Odd Schema"."odd.table" ("Id" int PRIMARY KEY, "a""b" int, "ü `x`" int);
CREATE TABLE keyless (v int);
CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10);
CREATE TABLE listed (id int PRIMARY KEY, shown text, hidden text);
CREATE TABLE elsewhere (id int PRIMARY KEY);
CREATE PUBLICATION pub FOR TABLE plain, moody, whole, by_index, derived, dropped,
    "Odd Schema"."odd.table", keyless, parts, listed"""
if DEFAULT_VERSION >= 15:
    TABLES += " (id, shown)"
ROWS = """
INSERT INTO plain VALUES (1); INSERT INTO moody VALUES (1, 'good'); INSERT INTO whole VALUES (1);
INSERT INTO by_index VALUES (1, 'x'); INSERT INTO derived (id) VALUES (1);
INSERT INTO dropped VALUES (1); INSERT INTO "Odd Schema"."odd.table" VALUES (1);
INSERT INTO keyless VALUES (1); INSERT INTO parts VALUES (1); INSERT INTO listed VALUES (1);
SET synchronous_commit = on; SELECT pg_logical_emit_message(true, 'p', 'hello')
"""


@on_both_versions
def test_a_table_is_described_as_its_first_change_will_describe_it(database: Database) -> None:
    database.execute(TABLES)
    database.execute("SELECT pg_create_logical_replication_slot('pub', 'pgoutput')")
    with database.connect() as connection:
        before = {
            relation.oid: relation
            for relation in map(parse_relation, published_relations(connection, "pub"))
        }
        database.execute(ROWS)
        sent = database.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes('pub', NULL, NULL, "
            "'proto_version', '1', 'publication_names', 'pub')"
        )
        after: dict[int, Relation] = {}
        for (message,) in sent:
            if message[:1] == b"R":
                bare = parse_relation(message)
                note = describe(connection, bare)
                after[bare.oid] = parse_relation(with_catalog(message, note))
    database.execute("SELECT pg_drop_replication_slot('pub')")
    assert len(after) == 10
    assert before == after


def test_a_publication_that_is_not_there_has_no_tables(database: Database) -> None:
    with database.connect() as connection:
        assert published_relations(connection, "absent") == []


def test_a_table_without_columns_is_described(database: Database) -> None:
    database.execute("CREATE TABLE bare (); CREATE PUBLICATION pub FOR TABLE bare")
    with database.connect() as connection:
        (only,) = map(parse_relation, published_relations(connection, "pub"))
    assert (only.name, only.columns) == ("bare", ())
