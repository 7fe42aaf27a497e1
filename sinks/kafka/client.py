"""The settings of the client library for a destination.

Invariant: every producer is idempotent and waits for all replicas in sync; what it cannot deliver
in time fails, and no later message of that partition overtakes it.
"""

from __future__ import annotations

from cdc.config.destination import KafkaDestination
from cdc.config.kafka import KafkaSasl, KafkaTls

Settings = dict[str, str | int | float | bool]
"""What librdkafka is configured by."""

_LINGER_MS = 5  # while a delivery is being queued; its end does not wait
_BATCH_BYTES = 1_000_000  # below the default limit of brokers
_MESSAGE_BYTES_MAX = 1_000_000_000  # what a message may have is the topic's to say
_QUEUED_MESSAGES_MAX = 1_000_000
_METADATA_WAIT_MS = 5_000  # for a topic that the broker has just created
_BACKOFF_MAX_MS = 1_000


def client_settings(destination: KafkaDestination) -> Settings:
    """Those that producers, consumers and administration have in common."""
    tls = destination.tls
    sasl = destination.sasl
    protocol = ("SASL_" if sasl else "") + ("SSL" if tls else "PLAINTEXT")
    settings: Settings = {
        "bootstrap.servers": ",".join(destination.bootstrap_servers),
        "security.protocol": protocol,
        "client.id": "walbrook",
        "socket.timeout.ms": max(10, destination.timeout_ms),
        "reconnect.backoff.max.ms": _BACKOFF_MAX_MS,
        "log_level": 0,
    }
    if tls:
        settings |= _tls(tls if isinstance(tls, KafkaTls) else KafkaTls())
    if sasl is not None:
        settings |= _sasl(sasl)
    return settings


def producer_settings(settings: Settings, *, compression: str, timeout_s: float) -> Settings:
    """Those of a producer whose deliveries take ``timeout_s`` at most."""
    return settings | {
        "enable.idempotence": True,
        "enable.gapless.guarantee": True,
        "acks": "all",
        "partitioner": "murmur2_random",
        "compression.type": compression,
        "linger.ms": _LINGER_MS,
        "batch.size": _BATCH_BYTES,
        "batch.num.messages": 100_000,
        "message.max.bytes": _MESSAGE_BYTES_MAX,
        "queue.buffering.max.messages": _QUEUED_MESSAGES_MAX,
        "message.timeout.ms": round(timeout_s * 1000),
        "topic.metadata.propagation.max.ms": min(_METADATA_WAIT_MS, round(timeout_s * 500)),
        "delivery.report.only.error": True,
    }


def _tls(tls: KafkaTls) -> Settings:
    settings: Settings = {
        "enable.ssl.certificate.verification": tls.verify,
        "ssl.endpoint.identification.algorithm": "https" if tls.verify else "none",
    }
    if tls.ca_file is not None:
        settings["ssl.ca.location"] = str(tls.ca_file)
    if tls.certificate_file is not None:
        settings["ssl.certificate.location"] = str(tls.certificate_file)
        settings["ssl.key.location"] = str(tls.key_file)
    if tls.key_password is not None:
        settings["ssl.key.password"] = tls.key_password.get_secret_value()
    return settings


def _sasl(sasl: KafkaSasl) -> Settings:
    settings: Settings = {"sasl.mechanism": sasl.mechanism}
    if sasl.username is not None and sasl.password is not None:
        settings["sasl.username"] = sasl.username
        settings["sasl.password"] = sasl.password.get_secret_value()
    if sasl.client_id is not None and sasl.client_secret is not None:
        settings |= {
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.token.endpoint.url": str(sasl.token_url),
            "sasl.oauthbearer.client.id": sasl.client_id,
            "sasl.oauthbearer.client.secret": sasl.client_secret.get_secret_value(),
        }
        if sasl.scope is not None:
            settings["sasl.oauthbearer.scope"] = sasl.scope
        if sasl.token_ca_file is not None:
            settings["https.ca.location"] = str(sasl.token_ca_file)
    return settings
