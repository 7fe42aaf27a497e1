"""The names in synchronous_standby_names, in every form that Postgres takes."""

from __future__ import annotations

import pytest

from cdc.replication.preflight.server import standby_names


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("", []),
        ("*", ["*"]),
        ("one", ["one"]),
        ("one, two", ["one", "two"]),
        ("2 (one, two)", ["one", "two"]),
        ("FIRST 1 (one,*)", ["one", "*"]),
        ('any 1 ("a b", "say ""hi""")', ["a b", 'say "hi"']),
        ('"walbrook:slot"', ["walbrook:slot"]),
        ("first", ["first"]),
    ],
)
def test_the_names_are_found_in_every_form(setting: str, names: list[str]) -> None:
    assert standby_names(setting) == names
