"""The command line as a program: fast to start, complete, readable in a pipe."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from cdc.errors import OperatorError
from cdc.service.cli import options
from cdc.service.cli.commands import COMMANDS, LazyCommand, load_command
from cdc.service.cli.entry import app
from cdc.version import VERSION

CPU_S = 0.5
TRIES = 3
"""Other programs of the machine take caches away: the best of some tries counts."""

CONFIG = """
databases:
  - name: shop
    hostname: 127.0.0.1
    port: 1
    database: shop
    slot: {name: s}
    publication: {name: p}
sinks:
  - {name: search, destination: {type: webhook, url: "http://localhost:1"}}
  - {name: archive, destination: {type: file, path: data}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "walbrook.yaml"
    path.write_text(CONFIG)
    return path


def cpu_s(*arguments: str) -> float:
    """The user and system time of one run of the command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "cdc.service.cli.entry", *arguments]
    subprocess.run(command, capture_output=True, check=False, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("status",),
        ("config", "check"),
        ("pause", "search"),
        ("run", "--help"),
        ("log", "cat", "--help"),
        ("doctor", "--help"),
    ],
)
def test_a_command_starts_in_less_than_half_a_second_of_cpu(
    arguments: tuple[str, ...], config: Path
) -> None:
    given = ("-c", str(config)) if "-" not in arguments[-1] else ()
    assert min(cpu_s(*arguments, *given) for _ in range(TRIES)) < CPU_S


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from cdc.service.cli.entry import app; app(['--help'], standalone_mode=False);"
        "heavy = {'psycopg', 'pydantic', 'pyarrow', 'numpy', 'rich', 'pyspark'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_that_there_is_stands_in_the_table() -> None:
    for name, where in COMMANDS.items():
        assert load_command(name) is not None, name
        held = getattr(get_command(typer_of(where)), "commands", {})
        of_module = {each for each, other in COMMANDS.items() if other.module == where.module}
        # One that is named is a group; else all that it holds are commands of their own.
        assert name not in held or held.keys() == of_module, name
    assert max(len(each.summary) for each in COMMANDS.values()) <= 52, "help fits 80 columns"


def typer_of(where: LazyCommand) -> typer.Typer:
    found = getattr(import_module(f"cdc.service.cli.{where.module}"), where.app)
    assert isinstance(found, typer.Typer)
    return found


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"walbrook {VERSION}\n"


def test_a_misspelt_command_is_answered_with_the_one_that_was_meant() -> None:
    result = CliRunner().invoke(app, ["statsu"])
    assert result.exit_code == 2
    assert "status" in result.output


def completed(config: Path, words: str) -> str:
    """What bash is offered behind these words."""
    environment = {
        **os.environ,
        "_WALBROOK_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "WALBROOK_CONFIG": str(config),
    }
    code = "import sys; sys.argv[0] = 'walbrook'; from cdc.service.cli.entry import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout


def test_the_shell_completes_commands_and_the_sinks_of_the_file(config: Path) -> None:
    assert completed(config, "walbrook dead").split() == ["dead-letters"]
    assert completed(config, "walbrook pause ").split() == ["search", "archive"]
    assert completed(config, "walbrook config ch").split() == ["check"]


def test_what_gives_something_up_is_not_done_without_a_yes(config: Path) -> None:
    for arguments in (
        ["discard-all", "search"],
        ["skip-to", "search", "0/600:1"],
        ["rewind", "search", "--to-earliest", "--destination", "truncate"],
        ["forget", "gone"],
        ["accept-gap", "shop", "0/1"],
        ["backfill", "skip", "7"],
    ):
        for answer in ("", "n\n"):
            result = CliRunner().invoke(app, [*arguments, "-c", str(config)], input=answer)
            assert isinstance(result.exception, OperatorError), arguments
            assert result.exception.fix == "add --yes"


def test_a_sink_that_the_file_still_names_is_not_forgotten(config: Path) -> None:
    for arguments in (["search"], ["shop/search"], ["shop", "--database"]):
        given = ["forget", *arguments, "--yes", "-c", str(config)]
        result = CliRunner().invoke(app, given)
        assert isinstance(result.exception, OperatorError)
        assert "take it out of the file first" in result.exception.fix


def test_a_check_says_in_one_round_what_it_did_not_look_at(config: Path) -> None:
    result = CliRunner().invoke(app, ["config", "check", "-c", str(config)])
    assert result.exit_code == 0
    unchecked, summary = result.output.splitlines()
    assert unchecked.startswith("not checked: databases, publications and tables, destinations")
    assert summary.endswith("correct: 1 database, 2 sinks")


def test_json_is_one_document(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options.print_json([{"at": None, "count": 3}])
    assert capsys.readouterr().out == (
        '{\n  "data": [\n    {\n      "at": null,\n      "count": 3\n    }\n  ]\n}\n'
    )
