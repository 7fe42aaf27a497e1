"""Oversize messages as references, on real destinations and in real stores, in every shape."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import orjson
import pyarrow as pa
import pytest
import redis

from cdc.config.destination import RedisStreamDestination, WebhookDestination
from cdc.config.secrets import SecretText
from cdc.decoding.shapes import SHAPES, Context, ShapeName, shape_for
from cdc.errors import TransientError
from cdc.queue.ledger import Integers
from sinks import ClaimPlace, open_sink
from sinks.base import RequestSink
from sinks.claim_stores import FolderClaims, TableClaims
from tests.conformance.messages import CONSUMER, Sample, batch_of, cursor_of
from tests.fix_http import Endpoint
from tests.fix_postgres import Database

pytestmark = pytest.mark.migrated

BIG = "x" * 50_000
LARGEST = 10_000


def _samples() -> list[Sample]:
    samples = [Sample({"id": n, "name": f"row {n}"}) for n in range(10)]
    samples[3] = Sample({"id": 3, "name": BIG}, {"name": BIG + "y"}, "update")
    samples[7] = Sample({"id": 7, "name": BIG + "ü"}, None, "delete")
    return samples


class Stores:
    """A place for the content, and how a reader gets it from there."""

    def __init__(self, place: ClaimPlace, read: Callable[[str], bytes]) -> None:
        self.place, self.read = place, read


@pytest.fixture(params=["folder", "table"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, database: Database) -> Stores:
    if request.param == "folder":
        url = (tmp_path / "claims").as_uri()

        def read_file(location: str) -> bytes:
            assert location.startswith(f"{url}/{CONSUMER}/")
            return Path(location.removeprefix("file://")).read_bytes()

        return Stores(ClaimPlace(LARGEST, 7, url, database.dsn), read_file)

    def read_row(location: str) -> bytes:
        ((payload,),) = database.execute(
            f"SELECT payload FROM walbrook.claim_checks WHERE location = '{location}'"
        )
        return bytes(cast("bytes", payload))

    return Stores(ClaimPlace(LARGEST, 7, None, database.dsn), read_row)


def _webhook(endpoint: Endpoint, place: ClaimPlace) -> RequestSink:
    sink = open_sink(
        WebhookDestination(url=endpoint.url), consumer=CONSUMER, batch_size=100, claims=place
    )
    return cast("RequestSink", sink)


def _reference(message: dict[str, Any], shape: ShapeName) -> dict[str, Any] | None:
    holder = {"sequin": "metadata", "debezium": "source"}.get(shape)
    found: dict[str, Any] = message[holder] if holder else message
    return found.get("claim_check")


def _check(reference: dict[str, Any], content: bytes, n: int) -> dict[str, Any]:
    lsn, idx = cursor_of(n)
    assert reference["idempotency_key"] == f"{lsn}:{idx}"
    assert reference["bytes"] == len(content) > LARGEST
    assert reference["sha256"] == hashlib.sha256(content).hexdigest()
    return cast("dict[str, Any]", orjson.loads(content))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_webhook_gets_a_reference_in_the_place_of_an_oversize_message(
    shape: ShapeName, stores: Stores, endpoint: Endpoint
) -> None:
    sink = _webhook(endpoint, stores.place)
    whole = batch_of(_samples(), shape=shape)
    delivery = sink.deliver(whole)
    sink.close()
    assert (delivery.settled, delivery.error) == (10, None)
    messages = [each for request in endpoint.accepted for each in request.messages]
    assert len(messages) == 10
    texts = whole.messages().to_pylist()
    for n, message in enumerate(cast("list[dict[str, Any]]", messages)):
        reference = _reference(message, shape)
        if n not in (3, 7):
            assert reference is None
            assert message == orjson.loads(texts[n])
            continue
        assert reference is not None
        content = _check(reference, stores.read(reference["location"]), n)
        assert content == orjson.loads(texts[n])
        assert len(orjson.dumps(message)) < 2_000
        if shape == "sequin":
            assert (message["record"], message["changes"]) == (None, None)
            assert message["action"] == content["action"]
        elif shape == "debezium":
            assert (message["before"], message["after"]) == (None, None)
            assert message["op"] == content["op"]
        else:
            assert list(message) == ["claim_check"]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stream_gets_a_reference_and_knows_its_entry_again(
    shape: ShapeName, stores: Stores, redis_url: str, redis_client: redis.Redis
) -> None:
    def open_stream() -> Any:
        return open_sink(
            RedisStreamDestination(url=SecretText(redis_url)),
            consumer=CONSUMER,
            batch_size=100,
            claims=stores.place,
        )

    samples = _samples()[:8]  # the last one is a reference
    for settled, absorbed in ((8, 0), (8, 8)):
        sink = open_stream()
        delivery = sink.deliver(batch_of(samples, shape=shape))
        assert (delivery.settled, delivery.absorbed, delivery.error) == (settled, absorbed, None)
        sink.close()
    entries = cast("list[Any]", redis_client.xrange(f"walbrook.{CONSUMER}"))
    assert len(entries) == 8
    body = {"sequin": b"metadata", "debezium": b"value", "record": b"record"}[shape]
    fields = orjson.loads(entries[7][1][body])
    reference = fields["claim_check"] if shape != "debezium" else fields["source"]["claim_check"]
    _check(reference, stores.read(reference["location"]), 7)


def test_what_is_sent_again_refers_to_the_same_content(stores: Stores, endpoint: Endpoint) -> None:
    for _ in range(2):  # as after a crash
        sink = _webhook(endpoint, stores.place)
        assert sink.deliver(batch_of(_samples())).settled == 10
        sink.close()
    messages = cast(
        "list[dict[str, Any]]", [each for r in endpoint.accepted for each in r.messages]
    )
    assert messages[3]["metadata"]["claim_check"] == messages[13]["metadata"]["claim_check"]


def test_requests_are_followed_by_a_ledger_as_before(stores: Stores, endpoint: Endpoint) -> None:
    noted: list[int] = []

    def accepted(lsn: Integers, _idx: Integers) -> None:
        noted.append(len(lsn))

    sink = _webhook(endpoint, stores.place)
    assert sink.deliver(batch_of(_samples()), accepted).settled == 10
    sink.close()
    assert noted == [10]


def test_nothing_is_sent_while_the_content_cannot_be_stored(
    endpoint: Endpoint, database: Database, tmp_path: Path
) -> None:
    (tmp_path / "claims").write_text("a file stands where the folder should be")
    folder = ClaimPlace(LARGEST, 7, (tmp_path / "claims").as_uri(), database.dsn)
    away = ClaimPlace(LARGEST, 7, None, "host=127.0.0.1 port=1 connect_timeout=2")
    for place in (folder, away):
        sink = _webhook(endpoint, place)
        delivery = sink.deliver(batch_of(_samples()))
        sink.close()
        assert delivery.settled == 0
        assert isinstance(delivery.error, TransientError)
    assert endpoint.requests == []


def test_old_content_is_removed_and_no_other(tmp_path: Path, database: Database) -> None:
    folder = FolderClaims(tmp_path.as_uri())
    folder.put("orders", "new", b"{}")
    for day in ("2001-02-03", "not-a-day"):
        (tmp_path / "orders" / day).mkdir()
        (tmp_path / "orders" / day / "old.json").write_bytes(b"{}")
    folder.clean("orders", 7)
    assert "2001-02-03" not in os.listdir(tmp_path / "orders")
    assert len(os.listdir(tmp_path / "orders")) == 2
    table = TableClaims(database.dsn)
    for name in ("old", "new"):
        table.put("orders", name, b"{}")
        table.put("others", name, b"{}")
    database.execute(
        "UPDATE walbrook.claim_checks SET stored_at = now() - interval '8 days'"
        " WHERE location LIKE '%/old' RETURNING 1"
    )
    table.clean("orders", 7)
    table.close()
    assert database.execute("SELECT location FROM walbrook.claim_checks ORDER BY 1") == [
        ("postgres:walbrook.claim_checks/orders/new",),
        ("postgres:walbrook.claim_checks/others/new",),
        ("postgres:walbrook.claim_checks/others/old",),
    ]


def test_a_reference_shows_no_option_of_its_url() -> None:
    store = FolderClaims("s3://bucket/folder?region=eu-central-1&endpoint_override=127.0.0.1:1")
    assert store._shown == "s3://bucket/folder"


def test_a_transformed_message_is_a_reference_as_a_whole() -> None:
    shape = shape_for("sequin", Context("c", "d", "h", "app", now_ns=0), transformed=True)
    rows = batch_of(_samples()).rows
    rows = rows.append_column("message", pa.array(["{}"] * 10))
    references = pa.array([None] * 9 + ['{"bytes":1}'])
    assert shape.messages(shape.refer(rows, references)).to_pylist() == [
        *["{}"] * 9,
        '{"claim_check":{"bytes":1}}',
    ]
