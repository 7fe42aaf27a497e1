"""How the Kafka sink authenticates, and that it verifies whom it talks to."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import orjson
import pytest

from cdc.config.destination import KafkaDestination
from cdc.errors import OperatorError
from sinks import open_sink
from sinks.base import Delivery
from tests.certificates import Authority
from tests.conformance.messages import CONSUMER, batch
from tests.fix_kafka import Kafka
from tests.kafka_broker import PASSWORD, USER

pytestmark = pytest.mark.sinks


def deliver(kafka: Kafka, port: int, **settings: object) -> Delivery:
    """What becomes of a small batch through the listener at ``port``."""
    topic = f"{kafka.prefix}.changes"
    if topic not in kafka.topics():
        kafka.create("changes")
    destination = KafkaDestination.model_validate(
        {
            "bootstrap_servers": (f"127.0.0.1:{port}",),
            "topic": topic,
            "timeout_ms": 10_000,
            **settings,
        }
    )
    sink = open_sink(destination, consumer=CONSUMER, batch_size=100, source="d")
    delivery = sink.deliver(batch(0, 10))
    sink.close()
    return delivery


def sasl(mechanism: str, password: str = PASSWORD) -> dict[str, object]:
    return {"mechanism": mechanism, "username": USER, "password": password}


def test_a_client_certificate_authenticates_over_tls(kafka: Kafka) -> None:
    authority = kafka.broker.authority
    certificate, key = authority.sign("DNS:client")
    tls = {
        "ca_file": str(authority.certificate),
        "certificate_file": str(certificate),
        "key_file": str(key),
    }
    delivery = deliver(kafka, kafka.broker.ports.tls, tls=tls)
    assert (delivery.settled, delivery.error) == (10, None)


@pytest.mark.parametrize("exactly_once", [False, True])
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_password_authenticates_over_tls(
    kafka: Kafka, mechanism: str, exactly_once: bool
) -> None:
    tls = {"ca_file": str(kafka.broker.authority.certificate)}
    port = kafka.broker.ports.sasl
    cursor = f"{kafka.prefix}.cursor" if exactly_once else None
    settings = {"tls": tls, "exactly_once": exactly_once, "cursor_topic": cursor}
    delivery = deliver(kafka, port, sasl=sasl(mechanism), **settings)
    assert (delivery.settled, delivery.error) == (10, None)


@pytest.mark.parametrize("exactly_once", [False, True])
def test_a_wrong_password_needs_an_operator_and_is_not_repeated(
    kafka: Kafka, exactly_once: bool
) -> None:
    delivery = deliver(
        kafka,
        kafka.broker.ports.sasl,
        tls={"ca_file": str(kafka.broker.authority.certificate)},
        sasl=sasl("SCRAM-SHA-256", "not-the-password"),
        exactly_once=exactly_once,
    )
    assert delivery.settled == 0
    assert isinstance(delivery.error, OperatorError)
    assert "sasl" in delivery.error.fix
    assert "not-the-password" not in delivery.error.full_text


def test_a_broker_with_a_certificate_of_another_authority_is_refused(
    kafka: Kafka, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    tls = {"ca_file": str(other.certificate)}
    delivery = deliver(kafka, kafka.broker.ports.sasl, tls=tls, sasl=sasl("PLAIN"))
    assert delivery.settled == 0
    assert isinstance(delivery.error, OperatorError)
    assert "ca_file" in delivery.error.fix
    unverified = deliver(kafka, kafka.broker.ports.sasl, tls={"verify": False}, sasl=sasl("PLAIN"))
    assert (unverified.settled, unverified.error) == (10, None)


class _Tokens(BaseHTTPRequestHandler):
    """Issues a token to whoever has the secret; the broker of the tests takes unsigned ones."""

    asked: list[dict[str, list[str]]]

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        type(self).asked.append(form)
        basic = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
        known = basic == "walbrook:token-secret"
        now = int(time.time())
        claims = {"sub": "walbrook", "iat": now, "exp": now + 600, "scope": form.get("scope")}
        token = f"{_part({'alg': 'none'})}.{_part(claims)}."
        body = orjson.dumps({"access_token": token, "token_type": "Bearer", "expires_in": 600})
        self.send_response(200 if known else 401)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body if known else b"{}")

    def log_message(self, *_: object) -> None:
        """Nothing."""


def _part(value: object) -> str:
    return base64.urlsafe_b64encode(orjson.dumps(value)).decode().rstrip("=")


@pytest.fixture
def token_url() -> Iterator[str]:
    _Tokens.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Tokens)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/token"
    server.shutdown()
    thread.join()
    server.server_close()


def test_client_credentials_authenticate_by_a_token(kafka: Kafka, token_url: str) -> None:
    by_token = {
        "mechanism": "OAUTHBEARER",
        "token_url": token_url,
        "client_id": "walbrook",
        "client_secret": "token-secret",
        "scope": "kafka",
    }
    tls = {"ca_file": str(kafka.broker.authority.certificate)}
    delivery = deliver(kafka, kafka.broker.ports.sasl, tls=tls, sasl=by_token)
    assert (delivery.settled, delivery.error) == (10, None)
    assert _Tokens.asked[0]["grant_type"] == ["client_credentials"]
    assert _Tokens.asked[0]["scope"] == ["kafka"]
