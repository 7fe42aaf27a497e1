"""Reading the file: interpolation in place, errors with lines, nothing secret said."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pydantic import ValidationError

from cdc.config import Config, load, loads, show
from cdc.config.reference import EXAMPLE, PAGE, render
from cdc.errors import ConfigError
from tests.unit.config.config_texts import BASE, FILE, OTHER, databases, read, refusal, sink

SECRET = "hunter2"


def test_a_whole_reference_is_read_like_text_of_the_file() -> None:
    text = databases("port: ${PORT:-5433}\nusername: ${USER_NAME:-}")
    assert read(text).databases[0].port == 5433
    assert read(text, PORT="6000").databases[0].port == 6000
    assert read(text).databases[0].username is None


@pytest.mark.parametrize("word", ["007", "true", "1e5", "0x10", "null ", "a: b", "[x]", "# no"])
def test_a_password_from_the_environment_is_kept_to_the_letter(word: str) -> None:
    password = read(databases("password: ${PW}"), PW=word).databases[0].password
    assert password is not None
    assert password.get_secret_value() == word


def test_a_quoted_reference_is_always_text() -> None:
    password = read(databases('password: "${PW}"'), PW="null").databases[0].password
    assert password is not None
    assert password.get_secret_value() == "null"


def test_a_variable_cannot_inject_structure() -> None:
    found = refusal(databases("hostname: h\nport: ${P}"), P="1\nsinks: []")
    assert "databases[0].port: should be a whole number" in found


def test_an_unset_variable_is_refused_by_name_and_place() -> None:
    found = refusal(databases("password: ${NOT_THERE}"))
    assert "line 6, databases[0].password: needs the environment variable NOT_THERE" in found
    assert "problems" not in found


def test_an_unset_variable_in_a_type_is_said_once() -> None:
    found = refusal(sink("destination: {type: '${T}', path: p}"))
    assert "sinks[0].destination.type: needs the environment variable T" in found
    assert "should be one of" not in found


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALBROOK_TEST_PORT", "7001")
    assert loads(databases("port: ${WALBROOK_TEST_PORT}"), BASE).databases[0].port == 7001


def test_all_problems_are_reported_at_once_in_the_order_of_the_file() -> None:
    text = (
        databases("prot: 1\nport: x\npassword: ${NOT_THERE}")
        + "sinks:\n- name: a\n  database: crm\n  destination: {type: file, pth: o}\n"
        + "log: {durability: maybe}\n"
    )
    lines = refusal(text).splitlines()
    assert lines[0] == "the configuration has 7 problems:"
    assert lines[1:4] == [
        "  line 6, databases[0].prot: unknown key; did you mean port?",
        "  line 7, databases[0].port: should be a whole number",
        "  line 8, databases[0].password: needs the environment variable NOT_THERE, which is "
        "not set; set it, or give a default with ${NOT_THERE:-…}",
    ]
    assert "  line 11, sinks[0].database: there is no database 'crm'; use one of shop" in lines
    assert "  line 12, sinks[0].destination.path: is required" in lines
    assert "  line 12, sinks[0].destination.pth: unknown key; did you mean path?" in lines
    assert "  line 13, log.durability: should be 'memory', 'disk' or 'fsync'" in lines


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (databases() + "snks: []", "line 6, snks: unknown key; did you mean sinks?"),
        (databases() + "zzz: 1", "zzz: unknown key; use one of databases, sinks, state, log"),
        (databases() + "service: {http: {prt: 1}}", "service.http.prt: unknown key; did you mean"),
        (sink("destination: {type: redis_stream, host: h, tls: {verfy: true}}"), "mean verify?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known(text: str, problem: str) -> None:
    assert problem in refusal(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "line 1: should be a mapping"),
        ("databases: shop", "line 1, databases: should be a list"),
        ("databases: [shop]", "line 1, databases[0]: should be a mapping"),
        (databases() + "log: 5", "line 6, log: should be a mapping"),
        (databases("username: [a]"), "line 6, databases[0].username: should be text"),
        (sink(FILE) + "  actions: insert", "sinks[0].actions: should be a list"),
    ],
)
def test_a_value_of_the_wrong_shape_is_refused(text: str, problem: str) -> None:
    assert problem in refusal(text)


def test_a_duplicate_key_is_refused_with_both_lines() -> None:
    found = refusal(databases("port: 1\nport: 2"))
    assert "line 7, databases[0].port: this key is already given on line 6" in found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1\nb: 2", "line 2: is not YAML"),
        ("a: 1\n\tb: 2", "line 2: is not YAML"),
        ("a: 1\n--- \nb: 2", "more than one document"),
        (f"a: *{SECRET}", "line 1: is not YAML we can read"),
        (f"a: !x!{SECRET} 1", "line 1: is not YAML we can read"),
        (databases(f"password: !{SECRET}"), "line 6, databases[0].password: has a tag"),
        ("a: \x00", "a character that YAML does not allow"),
        ("? {a: b}\n: c", "line 1: has a key that is not plain text"),
        ("[" * 5000, "nested too deep"),
        ("a: &a [*a]", "nested too deep"),
    ],
)
def test_a_file_that_is_not_yaml_is_refused_without_repeating_it(text: str, problem: str) -> None:
    found = refusal(text)
    assert problem in found
    assert SECRET not in found


def test_aliases_of_aliases_are_bounded() -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "nested too deep or too large" in refusal("\n".join(["l0: &l0 [x]", *levels]))


def test_an_alias_repeats_its_value() -> None:
    text = sink(f"source: &s {{include_tables: [t]}}\n{FILE}")
    config = read(text + f"- {{name: b, source: *s, {OTHER}}}\n")
    assert config.sinks[0].source == config.sinks[1].source


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file.*To fix it"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(path)


def test_paths_begin_at_the_folder_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/w.yaml").write_text(databases() + "log: {directory: ../log}")
    monkeypatch.chdir(tmp_path)
    config = load(Path("etc/w.yaml"), {})
    assert config.log.directory == tmp_path / "log"
    assert config.spark.checkpoint_directory == tmp_path / "etc/var/spark"


def test_an_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text("databases: []")
    with pytest.raises(ConfigError, match=r"w\.yaml: line 1, databases: should hold"):
        load(tmp_path / "w.yaml", {})


def test_a_configuration_is_frozen() -> None:
    config = read(databases())
    with pytest.raises(ValidationError, match="frozen"):
        config.log.linger_ms = 5


def test_a_configuration_survives_a_process_border() -> None:
    config = read(sink("destination: {type: redis_stream, host: h, password: pw}"))
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_configuration_made_in_code_follows_the_same_rules() -> None:
    shop = read(databases()).databases[0]
    sink_of_crm = read(sink(FILE)).sinks[0].model_copy(update={"database": "crm"})
    with pytest.raises(ValidationError, match=r"sinks\[0\].database: there is no database 'crm'"):
        Config(databases=[shop], sinks=[sink_of_crm])


MISPLACED = [
    databases("port: ${S}"),
    databases("sslmode: ${S}"),
    databases("slot: ${S}"),
    databases("url: ${S}\npassword: ${S}"),
    databases("url: mysql://u:${S}@h/d").replace("  database: shop\n", ""),
    databases("{password:hunter2}"),
    databases("password: {a: ${S}}"),
    databases() + "log: {batch_bytes: '${S}'}",
    sink("destination: {type: '${S}', path: o}"),
    sink("destination: {type: webhook, url: 'https://u:${S}@h'}"),
    sink("destination: {type: redis_stream, url: 'http://:${S}@h'}"),
    sink("destination: {type: webhook, url: 'https://h', headers: {A: \"${S}\\n\"}}"),
    sink("filter: '${S}; x'\n" + FILE),
    databases("{password:hunter2: 1}").replace("  {", "  x: {"),
]


@pytest.mark.parametrize("text", MISPLACED)
def test_a_secret_in_the_wrong_place_is_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, S=SECRET)
    assert SECRET not in str(caught.value)
    # A chained error of the model would carry the refused value into every traceback.
    assert caught.value.__context__ is None


EVERY_SECRET = """\
databases:
- name: shop
  url: postgres://me:hunter2@h/shop?sslmode=require
  slot: {name: w}
  publication: {name: w}
- name: crm
  database: crm
  password: hunter2
  slot: {name: w}
  publication: {name: w}
sinks:
- {name: a, database: shop, destination: {type: redis_stream, url: "redis://:hunter2@h/0"}}
- {name: b, database: shop, destination: {type: redis_stream, host: h, password: hunter2}}
- name: c
  database: crm
  destination: {type: webhook, url: "https://h/p?t=hunter2", headers: {Authorization: hunter2}}
state: {url: "postgres://me:hunter2@h/state"}
spark: {conf: {a: "$$5"}}
"""


def test_no_secret_is_shown_or_printed() -> None:
    config = read(EVERY_SECRET)
    for printed in (show(config), repr(config), str(config)):
        assert SECRET not in printed
    assert "url: postgres://me:***@h/shop?sslmode=require" in show(config)
    assert "Authorization: '***'" in show(config)


def test_the_shown_text_is_a_configuration_again() -> None:
    shown = show(read(EVERY_SECRET))
    assert "$$5" in shown
    assert show(read(shown)) == shown


def test_the_example_loads() -> None:
    config = load(EXAMPLE, {"SHOP_PASSWORD": SECRET, "MAIL_TOKEN": SECRET})
    kinds = [s.destination.type for s in config.sinks_of("shop")]
    assert kinds == ["redis_stream", "file", "webhook", "parquet"]
    assert config.state_dsn() == config.databases[0].dsn()


def test_the_example_says_which_variables_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"(?s)SHOP_PASSWORD.*MAIL_TOKEN"):
        load(EXAMPLE, {})


def test_the_reference_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m cdc.config.reference"
