"""Interpolation of environment variables: pure text in, text out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config.interpolate import InterpolationError, escape, interpolate, is_one_reference


def test_a_reference_becomes_the_variables_value() -> None:
    assert interpolate("a-${X}-b", {"X": "1"}) == "a-1-b"


def test_several_references_in_one_value_are_all_replaced() -> None:
    assert interpolate("${A}:${B:-2}", {"A": "1"}) == "1:2"


def test_a_set_but_empty_variable_is_empty_text() -> None:
    assert interpolate("[${X}]", {"X": ""}) == "[]"


def test_an_unset_variable_is_refused_by_name() -> None:
    with pytest.raises(InterpolationError, match="environment variable NOT_THERE"):
        interpolate("${NOT_THERE}", {})


@pytest.mark.parametrize(("environ", "expected"), [({}, "d"), ({"X": ""}, "d"), ({"X": "v"}, "v")])
def test_a_default_stands_in_for_an_unset_or_empty_variable(
    environ: dict[str, str], expected: str
) -> None:
    assert interpolate("${X:-d}", environ) == expected


@pytest.mark.parametrize(("environ", "expected"), [({}, ""), ({"X": ""}, ""), ({"X": "v"}, "r")])
def test_a_replacement_stands_in_for_a_set_variable(environ: dict[str, str], expected: str) -> None:
    assert interpolate("${X:+r}", environ) == expected


def test_a_default_may_hold_colons_spaces_and_dollars() -> None:
    assert interpolate("${X:-postgres://a:b@c/d $1 :-}", {}) == "postgres://a:b@c/d $1 :-"


def test_two_dollars_become_one_and_protect_a_reference() -> None:
    assert interpolate("$$ $${X}", {"X": "no"}) == "$ ${X}"


def test_any_other_dollar_stays() -> None:
    assert interpolate("a$b $ 5$", {"b": "no"}) == "a$b $ 5$"


@pytest.mark.parametrize("text", ["${", "${X", "${1X}", "${X:?no}", "${X-d}", "${A:-${B}}"])
def test_a_brace_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InterpolationError, match=r"\$\$\{"):
        interpolate(text, {"X": "x", "A": "", "B": "b"})


@given(value=st.text())
def test_the_value_of_a_variable_is_not_interpolated_again(value: str) -> None:
    assert interpolate("<${X}>", {"X": value}) == f"<{value}>"


@given(text=st.text(alphabet="$ab{}:-+X\n ") | st.text())
def test_escaped_text_comes_back_as_it_was(text: str) -> None:
    assert interpolate(escape(text), {}) == text


@pytest.mark.parametrize(
    ("text", "whole"),
    [("${X}", True), ("${X:-a b}", True), ("${X}${Y}", False), ("a${X}", False), ("$$", False)],
)
def test_a_whole_reference_is_distinguished_from_a_mixture(text: str, whole: bool) -> None:
    assert is_one_reference(text) is whole
