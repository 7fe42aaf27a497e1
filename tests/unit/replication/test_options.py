"""What is asked of pgoutput: as much as the server has, and an error for more."""

from __future__ import annotations

import pytest

from cdc.errors import SourceError
from cdc.replication.options import StreamOptions, plugin_options


@pytest.mark.parametrize("version", [140011, 150002, 160000, 170004, 180001])
def test_nothing_special_is_protocol_1_with_messages_everywhere(version: int) -> None:
    assert plugin_options(version, StreamOptions()) == (
        ("proto_version", "1"),
        ("messages", "true"),
    )


def test_streaming_is_protocol_2_from_14_on() -> None:
    wanted = StreamOptions(stream_transactions=True)
    assert dict(plugin_options(140000, wanted)) == {
        "proto_version": "2",
        "messages": "true",
        "streaming": "on",
    }


def test_two_phase_is_protocol_3_with_or_without_streaming() -> None:
    alone = dict(plugin_options(150000, StreamOptions(two_phase=True)))
    assert alone["proto_version"] == "3"
    assert alone["two_phase"] == "on"
    assert "streaming" not in alone
    both = dict(plugin_options(150000, StreamOptions(stream_transactions=True, two_phase=True)))
    assert both == {**alone, "streaming": "on"}


def test_origin_is_named_only_where_it_is_not_the_default() -> None:
    assert "origin" not in dict(plugin_options(180000, StreamOptions(origin="any")))
    assert dict(plugin_options(160000, StreamOptions(origin="none")))["origin"] == "none"


@pytest.mark.parametrize(
    ("version", "wanted", "says"),
    [
        (130009, StreamOptions(), "Postgres 13 is too old"),
        (140009, StreamOptions(two_phase=True), "needs 15 or later.*slot.two_phase"),
        (150009, StreamOptions(origin="none"), "needs 16 or later.*set origin"),
    ],
)
def test_options_that_the_server_lacks_are_refused_with_what_to_do(
    version: int, wanted: StreamOptions, says: str
) -> None:
    with pytest.raises(SourceError, match=says) as caught:
        plugin_options(version, wanted)
    assert caught.value.kind == "server_too_old"
