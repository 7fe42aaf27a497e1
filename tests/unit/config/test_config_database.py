"""The databases of a file and the state database."""

from __future__ import annotations

import pytest
from psycopg.conninfo import conninfo_to_dict

from cdc.errors import OperatorError
from tests.unit.config.config_texts import BASE, databases, read, refusal

URL = """\
databases:
- name: shop
  url: {url}
  slot: {{name: walbrook}}
  publication: {{name: walbrook}}
"""


def test_a_database_needs_little_and_defaults_the_rest() -> None:
    shop = read(databases()).database("shop")
    assert (shop.hostname, shop.port, shop.username, shop.password) == (
        "localhost",
        5432,
        None,
        None,
    )
    assert shop.slot.create_if_not_exists is False
    assert shop.publication.create_if_not_exists is False
    assert (shop.publication.init_sql, shop.publication.tables) == (None, None)


def test_the_dsn_holds_every_part_quoted_for_libpq() -> None:
    text = databases("""\
        hostname: db.internal
        port: 5433
        username: reader
        password: it's a \\ secret
        sslmode: verify-full
        sslrootcert: certs/root.pem
        """)
    assert conninfo_to_dict(read(text).databases[0].dsn()) == {
        "host": "db.internal",
        "port": "5433",
        "dbname": "shop",
        "user": "reader",
        "password": "it's a \\ secret",
        "sslmode": "verify-full",
        "sslrootcert": str(BASE / "certs/root.pem"),
    }


def test_a_url_takes_the_place_of_the_parts() -> None:
    shop = read(URL.format(url="postgres://me:pw@h:5433/shop")).databases[0]
    parameters = conninfo_to_dict(shop.dsn())
    assert (parameters["host"], parameters["password"]) == ("h", "pw")


def test_tls_settings_join_a_url() -> None:
    shop = read(URL.format(url="postgres://h/shop\n  sslmode: require")).databases[0]
    assert conninfo_to_dict(shop.dsn())["sslmode"] == "require"


def test_the_word_system_is_kept_as_libpq_knows_it() -> None:
    assert read(databases("sslrootcert: system")).databases[0].sslrootcert == "system"


def test_the_displayed_dsn_has_no_password() -> None:
    by_url = read(URL.format(url="postgres://me:hunter2@h/shop?sslpassword=hunter2"))
    by_parts = read(databases("password: hunter2"))
    for config in (by_url, by_parts):
        assert "dbname=shop" in config.databases[0].display_dsn()
        assert "hunter2" not in config.databases[0].display_dsn()


@pytest.mark.parametrize("part", ["hostname: h", "port: 5432", "username: u", "password: p"])
def test_a_url_beside_a_part_is_impossible(part: str) -> None:
    found = refusal(URL.format(url=f"postgres://h/shop\n  {part}"))
    assert f"databases[0]: url and {part.partition(':')[0]} cannot both be given" in found


def test_a_database_without_url_and_database_is_refused() -> None:
    assert "needs url or database" in refusal(databases().replace("  database: shop\n", ""))


@pytest.mark.parametrize(
    "url", ["mysql://h/d", "host=h dbname=d", "postgres://h/d?nonsense=1", "postgres://h:x/d"]
)
def test_a_text_that_is_no_postgres_url_is_refused(url: str) -> None:
    assert "databases[0].url: should be a URL such as postgres://" in refusal(URL.format(url=url))


@pytest.mark.parametrize("name", ["Upper", "with-dash", "x" * 64, '""'])
def test_a_slot_name_follows_postgres_rule(name: str) -> None:
    text = databases().replace("slot: {name: walbrook}", f"slot: {{name: {name}}}")
    assert "databases[0].slot.name: should be 1 to 63 lower-case letters" in refusal(text)


@pytest.mark.parametrize("name", ["-a", ".a", "a b", "é", "x" * 64])
def test_a_database_name_follows_the_rule(name: str) -> None:
    text = databases().replace("name: shop", f"name: {name}", 1)
    assert "databases[0].name: should be a name" in refusal(text)


@pytest.mark.parametrize("name", ["a", "0", "A.b_c-d", "x" * 63])
def test_a_name_within_the_rule_is_taken(name: str) -> None:
    config = read(databases().replace("name: shop", f"name: {name}", 1))
    assert config.database(name).name == name


def test_an_unknown_sslmode_is_refused_with_the_known_ones() -> None:
    assert "should be 'disable', 'prefer', 'require'" in refusal(databases("sslmode: allow"))


@pytest.mark.parametrize("port", ["0", "65536", "true", "5432.0", "http"])
def test_a_port_is_a_whole_number_in_range(port: str) -> None:
    assert "databases[0].port: should be" in refusal(databases(f"port: {port}"))


def test_publication_tables_are_qualified() -> None:
    text = databases().replace(
        "publication: {name: walbrook}", "publication: {name: w, tables: [a, s.b, 's.\"c.d\"']}"
    )
    assert read(text).databases[0].publication.tables == ("public.a", "s.b", "s.c.d")


def test_at_least_one_database_is_required() -> None:
    assert "databases: is required" in refusal("")
    assert "databases: should hold at least one entry" in refusal("databases: []")


def test_database_names_are_unique() -> None:
    two = databases() + databases().removeprefix("databases:\n")
    assert "databases[1].name: 'shop' is already the name of databases[0]" in refusal(two)


def test_an_unknown_database_is_asked_for_with_the_known_ones_named() -> None:
    with pytest.raises(OperatorError, match=r"no database 'x'.*shop"):
        read(databases()).database("x")


def test_state_lives_in_the_first_database_by_default() -> None:
    config = read(databases("password: pw"))
    assert config.state_dsn() == config.databases[0].dsn()
    assert "password=pw" in config.state_dsn()


def test_state_may_live_elsewhere() -> None:
    config = read(databases() + "state: {url: 'postgres://me:pw@state/w'}")
    assert conninfo_to_dict(config.state_dsn())["host"] == "state"
