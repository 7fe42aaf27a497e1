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
from cdc.errors import OperatorError, TransientError, WalbrookError
from cdc.queue.ledger.base import Integers
from sinks import ClaimPlace, open_sink
from sinks.base import RequestSink, Unfollowed
from sinks.claim_stores import FolderClaims, TableClaims
from tests.conformance.messages import CONSUMER, Sample, batch_of, cursor_of
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.fix_s3 import S3, Account
from tests.waiting import until

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


@pytest.fixture(params=["folder", "table", pytest.param("s3", marks=pytest.mark.sinks)])
def stores(request: pytest.FixtureRequest, tmp_path: Path, database: Database) -> Stores:
    if request.param == "s3":
        s3: S3 = request.getfixturevalue("s3")
        return Stores(ClaimPlace(LARGEST, 7, s3.url, database.dsn), s3.read)
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


def test_a_message_that_is_sent_again_refers_to_the_same_content(
    stores: Stores, endpoint: Endpoint
) -> None:
    for _ in range(2):  # as after a crash
        sink = _webhook(endpoint, stores.place)
        assert sink.deliver(batch_of(_samples())).settled == 10
        sink.close()
    messages = cast(
        "list[dict[str, Any]]", [each for r in endpoint.accepted for each in r.messages]
    )
    assert messages[3]["metadata"]["claim_check"] == messages[13]["metadata"]["claim_check"]


def test_requests_are_followed_by_a_ledger_as_before(stores: Stores, endpoint: Endpoint) -> None:
    class Noted(Unfollowed):
        def __init__(self) -> None:
            self.counts: list[int] = []

        def accepted(self, lsn: Integers, idx: Integers) -> None:
            self.counts.append(len(lsn))

    noted = Noted()
    sink = _webhook(endpoint, stores.place)
    (delivery,) = sink.deliver_parts([batch_of(_samples())], noted)
    assert delivery.settled == 10
    sink.close()
    assert noted.counts == [10]


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


def test_deliveries_remove_old_content_faster_than_they_store_it(
    endpoint: Endpoint, database: Database
) -> None:
    place = ClaimPlace(LARGEST, 7, None, database.dsn)
    database.execute(
        "INSERT INTO walbrook.claim_checks (location, consumer, payload, stored_at) "
        f"SELECT n, '{CONSUMER}', '', now() - interval '8 days' FROM generate_series(1, 12000) n"
    )
    old = "SELECT count(*) FROM walbrook.claim_checks WHERE stored_at < now() - interval '7 days'"
    sink = _webhook(endpoint, place)
    sent = 0

    def removed() -> bool:
        nonlocal sent
        sample = Sample({"id": sent, "name": BIG})
        assert sink.deliver(batch_of([sample])).settled == 1
        sent += 1
        return database.execute(old) == [(0,)]

    try:
        until("the old content to be removed", removed)
    finally:
        sink.close()
    assert 1 < sent < 1_000, "one delivery removed all, or each of them little"


@pytest.mark.sinks
def test_content_in_s3_is_one_object_however_often_it_is_put_and_old_objects_are_removed(
    s3: S3,
) -> None:
    store = FolderClaims(s3.url)
    store.probe()
    locations = {store.put("orders", "new", b"{}") for _ in range(3)}
    (location,) = locations
    assert location.startswith(f"s3://{s3.bucket}/claims/orders/")
    assert s3.read(location) == b"{}"
    large = store.put("orders", "large", bytes(12 << 20))
    assert s3.read(large) == bytes(12 << 20)
    for day in ("2001-02-03", "not-a-day"):
        s3.write(f"claims/orders/{day}/old.json", b"{}")
    store.clean("orders", 7)
    store.clean("others", 7)
    found = {key.rsplit("/", 2)[-1] for key in s3.objects() if key.endswith(".json")}
    assert found == {"new.json", "large.json", "old.json"}
    assert "claims/orders/2001-02-03/old.json" not in s3.objects()
    assert "claims/orders/not-a-day/old.json" in s3.objects()


@pytest.mark.sinks
@pytest.mark.parametrize(
    ("bucket", "key", "secret", "code"),
    [
        ("there-is-no-such-bucket", "", "", "NO_SUCH_BUCKET"),
        ("", "AKIAUNKNOWN000000000", "", "INVALID_ACCESS_KEY_ID"),
        ("", "", "wrong", "SIGNATURE_DOES_NOT_MATCH"),
        ("", "stranger", "", "ACCESS_DENIED"),
    ],
)
def test_s3_that_refuses_is_an_operators_matter_and_nothing_is_sent(
    bucket: str,
    key: str,
    secret: str,
    code: str,
    s3: S3,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    account = s3.stranger if key == "stranger" else Account(key, secret)
    if account.key:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", account.key)
    if account.secret:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", account.secret)
    url = f"s3://{bucket or s3.bucket}/claims?{s3.options}"
    sink = _webhook(endpoint, ClaimPlace(LARGEST, 7, url, ""))
    delivery = sink.deliver(batch_of(_samples()))
    sink.close()
    assert delivery.settled == 0
    assert isinstance(delivery.error, OperatorError)
    assert delivery.error.what.endswith(code)
    assert s3.endpoint not in delivery.error.full_what
    assert endpoint.requests == []
    with pytest.raises(OperatorError):
        FolderClaims(url).probe()


@pytest.mark.sinks
def test_without_credentials_nothing_is_stored(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    store = FolderClaims(s3.url)
    # S3 itself answers ACCESS_DENIED, this server with an error of its own.
    with pytest.raises(WalbrookError):
        store.put("orders", "a", b"{}")
    assert s3.objects() == []


@pytest.mark.sinks
def test_s3_over_tls_is_used_if_its_certificate_is_trusted_only(s3: S3) -> None:
    url = f"s3://{s3.bucket}/claims?{s3.tls_options}"
    with pytest.raises(OperatorError, match="tls_ca_file_path"):
        FolderClaims(url).put("orders", "a", b"{}")
    trusting = FolderClaims(f"{url}&tls_ca_file_path={s3.authority}")
    trusting.probe()
    location = trusting.put("orders", "a", b"{}")
    assert location.startswith(f"s3://{s3.bucket}/claims/orders/")


def test_s3_that_does_not_answer_is_tried_again() -> None:
    with pytest.raises(TransientError, match="NETWORK_CONNECTION"):
        FolderClaims("s3://bucket/claims?scheme=http&endpoint_override=127.0.0.1:1").put(
            "orders", "a", b"{}"
        )


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
