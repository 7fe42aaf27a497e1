"""What becomes of a message that is larger than its sink takes, from the log to the endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from cdc.connection import Connection
from tests.fix_http import Endpoint
from tests.log_pipeline import LogPipeline
from tests.queue_pipeline import insert

pytestmark = pytest.mark.migrated


@pytest.mark.parametrize("oversize", ["dead_letter", "claim_check"])
def test_an_oversize_message_is_what_its_sink_says(
    state: Connection, tmp_path: Path, endpoint: Endpoint, oversize: str
) -> None:
    hook = {
        "destination": {"type": "webhook", "url": endpoint.url},
        "max_message_bytes": 2_000,
        "oversize": oversize,
    }
    pipeline = LogPipeline(state, tmp_path, hook=hook)
    for number in (1, 2, 3):
        name = "x" * 5_000 if number == 2 else "small"
        pipeline.write(*insert(number, (number, name)))
    pipeline.take()
    messages = cast(
        "list[dict[str, Any]]", [each for r in endpoint.accepted for each in r.messages]
    )
    letters = pipeline.rows("SELECT commit_lsn::text, kind FROM walbrook.dead_letters")
    if oversize == "dead_letter":
        assert [each["record"]["id"] for each in messages] == [1, 3]
        assert letters == [("0/200", "delivery")]
    else:
        assert letters == []
        assert [each["metadata"]["commit_lsn"] for each in messages] == [0x100, 0x200, 0x300]
        assert messages[1]["record"] is None
        location = messages[1]["metadata"]["claim_check"]["location"]
        ((payload,),) = pipeline.rows(
            f"SELECT payload FROM walbrook.claim_checks WHERE location = '{location}'"
        )
        assert orjson.loads(bytes(payload))["record"]["name"] == "x" * 5_000
    pipeline.close()
