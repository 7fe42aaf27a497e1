"""The destinations of Sequin, those that have an equivalent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cdc.service.imports.imported import Imported, Section, section, sections, taken

_MECHANISMS: Final = {
    "plain": "PLAIN",
    "scram_sha_256": "SCRAM-SHA-256",
    "scram_sha_512": "SCRAM-SHA-512",
}
_REDIS: Final = {
    key: key for key in ("host", "port", "database", "username", "password", "tls", "stream_key")
}
_PULL: Final = {"max_ack_pending": "max_in_flight", "max_waiting": "max_waiting"}

Endpoints = dict[str, Section]


def destination_of(
    sink: Section, endpoints: Endpoints, where: str, found: Imported
) -> Section | None:
    """The destination of a sink; none if there is nothing like it."""
    given = section(sink.get("destination"))
    kind = str(given.get("type"))
    read = _KINDS.get(kind)
    if read is None:
        found.remark(
            where,
            f"there is no destination of type {kind}, and the sink is left out",
            "deliver to a webhook, to Kafka or to a pull consumer in its place",
        )
        return None
    return read(given, endpoints, f"{where}.destination", found)


def _kafka(given: Section, _endpoints: Endpoints, where: str, found: Imported) -> Section:
    known = ("type", "hosts", "topic", "tls", "username", "password", "sasl_mechanism",
             "compression", "message_key")  # fmt: skip
    found.unknown(where, given, known)
    kafka: Section = {
        "type": "kafka",
        "bootstrap_servers": [each.strip() for each in str(given.get("hosts", "")).split(",")],
        **taken(given, {"topic": "topic", "compression": "compression", "tls": "tls"}),
    }
    mechanism = given.get("sasl_mechanism")
    if mechanism is not None:
        ours = _MECHANISMS.get(str(mechanism).lower())
        if ours is None:
            found.remark(f"{where}.sasl_mechanism", f"{mechanism} is not there", "set sasl by hand")
        else:
            users = taken(given, {"username": "username", "password": "password"})
            kafka["sasl"] = {"mechanism": ours, **users}
    _verified(given, where, found)
    return kafka


def _redis(given: Section, _endpoints: Endpoints, where: str, found: Imported) -> Section:
    found.unknown(where, given, ("type", *_REDIS))
    _verified(given, where, found)
    return {"type": "redis_stream", **taken(given, _REDIS)}


def _verified(given: Section, where: str, found: Imported) -> None:
    if given.get("tls") in (True, "true"):
        found.remark(
            f"{where}.tls",
            "Sequin verifies no certificate, Walbrook does",
            "give tls: {ca_file: …} for a private authority",
        )


def _webhook(given: Section, endpoints: Endpoints, where: str, found: Imported) -> Section:
    found.unknown(where, given, ("type", "http_endpoint", "http_endpoint_path", "batch"))
    name = str(given.get("http_endpoint"))
    endpoint = endpoints.get(name, {})
    url = str(endpoint.get("url") or "")
    if not url:
        found.remark(
            f"http_endpoints.{name}",
            "has no url of its own (a tunnel or a test endpoint)",
            "write the sink's destination.url by hand",
        )
        url = "http://localhost:8000"
    path = str(given.get("http_endpoint_path") or "")
    if path:
        url = f"{url.rstrip('/')}/{path.lstrip('/')}"
    if "batch" not in given:
        found.remark(
            f"{where}.batch",
            "is not given, and versions of Sequin differ in what that means",
            "Walbrook sends many messages a request as data; set batch: false for one",
        )
    headers = {**_headers(endpoint.get("headers")), **_headers(endpoint.get("encrypted_headers"))}
    webhook: Section = {"type": "webhook", "url": url, **taken(given, {"batch": "batch"})}
    return {**webhook, "headers": headers} if headers else webhook


def _headers(given: object) -> Section:
    """A list of keys and values, or a mapping."""
    if isinstance(given, dict):
        return section(given)
    return {str(each.get("key")): each.get("value") for each in sections(given)}


def _pull(given: Section, _endpoints: Endpoints, where: str, found: Imported) -> Section:
    found.unknown(where, given, ("type", "ack_wait_ms", *_PULL))
    pull: Section = {"type": "pull", **taken(given, _PULL)}
    wait = given.get("ack_wait_ms")
    if isinstance(wait, int):
        pull["visibility_s"] = max(1, wait // 1000)
    return pull


_KINDS: Final[dict[str, Callable[[Section, Endpoints, str, Imported], Section]]] = {
    "kafka": _kafka,
    "redis": _redis,
    "redis_stream": _redis,
    "webhook": _webhook,
    "sequin_stream": _pull,
}
