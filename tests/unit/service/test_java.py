"""Which Java is taken, told with programs that answer as Java does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cdc.errors import OperatorError
from cdc.service.process.java import find_java, require_java

VECTOR = "jdk.incubator.vector"


def java(home: Path, version: str, *modules: str) -> Path:
    """A program that answers like the Java of ``home``; the home itself."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    lines = [f"java.base@{version}", *(f"{module}@{version}" for module in modules)]
    program.write_text(
        f"#!/bin/sh\necho '    java.home = {home}' >&2\n"
        + "".join(f"echo {line}\n" for line in lines)
    )
    program.chmod(0o755)
    return home


def test_the_java_home_that_is_set_comes_first(tmp_path: Path) -> None:
    given, other = (java(tmp_path / name, "17.0.1", VECTOR) for name in ("given", "other"))
    environ = {"JAVA_HOME": str(given), "PATH": str(other / "bin")}
    assert find_java(environ, ()) == given


def test_a_java_home_that_will_not_do_is_passed_over(tmp_path: Path) -> None:
    old = java(tmp_path / "old", "11.0.2", VECTOR)
    good = java(tmp_path / "good", "21", VECTOR)
    environ = {"JAVA_HOME": str(old), "PATH": f"{tmp_path}{os.pathsep}{good / 'bin'}"}
    assert find_java(environ, ()) == good


def test_a_link_on_the_path_leads_to_the_home(tmp_path: Path) -> None:
    home = java(tmp_path / "jvm" / "java-17", "17.0.1", VECTOR)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    assert find_java({"PATH": str(tmp_path / "bin")}, ()) == home


def test_an_installed_java_is_found_without_variables(tmp_path: Path) -> None:
    java(tmp_path / "jvm" / "a-slim", "17.0.1", "java.sql")
    java(tmp_path / "jvm" / "b-broken", "17.0.1", VECTOR).joinpath("bin/java").chmod(0o644)
    good = java(tmp_path / "jvm" / "c-whole", "25.0.1", VECTOR)
    assert find_java({}, (f"{tmp_path}/jvm/*",)) == good


def test_without_java_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="needs Java 17 or later") as caught:
        find_java({"PATH": str(tmp_path)}, (f"{tmp_path}/*",))
    assert "apt-get install openjdk-17-jre-headless" in caught.value.fix
    assert "JAVA_HOME" in caught.value.fix
    assert "found)" not in caught.value.what


def test_a_java_without_the_module_is_said_to_be_there(tmp_path: Path) -> None:
    slim = java(tmp_path / "slim", "21.0.1", "jdk.incubator.vectors")
    with pytest.raises(OperatorError, match="1 found"):
        find_java({"JAVA_HOME": str(slim)}, ())


def test_the_java_of_this_machine_is_put_into_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    require_java()
    assert Path(os.environ["JAVA_HOME"], "bin", "java").exists()
