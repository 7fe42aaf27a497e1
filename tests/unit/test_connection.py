"""Options of a connection: its owner's are kept, ours come behind them."""

from __future__ import annotations

from cdc.connection import with_options


def test_options_in_the_connection_string_are_kept() -> None:
    found = with_options("host=h options='-c role=reader'", {"statement_timeout": "5s"})
    assert found.startswith("-c role=reader -c idle_session_timeout=0 ")
    assert found.endswith(" -c statement_timeout=5s")


def test_a_value_with_a_space_is_escaped_as_libpq_wants_it() -> None:
    found = with_options("host=h", {"DateStyle": "ISO, MDY"})
    assert found.endswith(" -c DateStyle=ISO,\\ MDY")
