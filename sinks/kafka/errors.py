"""What an error of the Kafka client means: whether it passes by itself or needs a person.

Invariant: ``what`` names the error's code and topics, never what a message holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cdc.errors import OperatorError, PoisonError, TransientError, WalbrookError
from cdc.queue.retry import TOO_LARGE
from sinks.kafka.library import KafkaError, KafkaException

FENCED: Final = "fenced"
"""The kind of the error that says that another process delivers under our transactional id."""

_TEXT_MAX = 300

FENCING = frozenset(
    {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
)
_LARGE = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
_REFUSED = frozenset({KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG})
_GIVEN_UP = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
"""What we gave up ourselves when time had run out."""

_CONSEQUENCES = frozenset(
    {
        KafkaError._FATAL,
        KafkaError._GAPLESS_GUARANTEE,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
    }
)
"""Errors that follow from another one, which says more."""

_FIXES: Final = {
    KafkaError.UNKNOWN_TOPIC_OR_PART: "create the topic, or let the sink do so: create_topics",
    KafkaError._UNKNOWN_TOPIC: "create the topic, or let the sink do so: create_topics",
    KafkaError._UNKNOWN_PARTITION: "create the topic, or let the sink do so: create_topics",
    KafkaError.TOPIC_EXCEPTION: "correct topic, or what routing gives: letters, digits, ., _ and -",
    KafkaError._AUTHENTICATION: "correct sasl of the destination",
    KafkaError.SASL_AUTHENTICATION_FAILED: "correct sasl of the destination",
    KafkaError.UNSUPPORTED_SASL_MECHANISM: "use a sasl.mechanism that the broker has",
    KafkaError._SSL: "correct tls of the destination: ca_file, and the names in the certificate",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "let the user write to the topic (ACL Write, Describe)",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "let the user write (ACL IdempotentWrite on cluster)",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "let the user write under the transactional "
    "id (ACL Write, Describe)",
    KafkaError.INVALID_REPLICATION_FACTOR: "lower create_topics.replication_factor: there are "
    "fewer brokers",
    KafkaError.INVALID_PARTITIONS: "correct create_topics.partitions",
    KafkaError.INVALID_CONFIG: "correct create_topics.config",
    KafkaError.POLICY_VIOLATION: "create the topic as the cluster's policy says",
    KafkaError._INVALID_ARG: "correct the destination",
    KafkaError._UNSUPPORTED_FEATURE: "use a broker that has idempotent producers and transactions",
    KafkaError.UNSUPPORTED_VERSION: "use a broker that has idempotent producers and transactions",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "lower timeout_ms: the broker allows less "
    "(transaction.max.timeout.ms)",
}
"""What a person does about an error that does not pass."""


def meaning(error: KafkaError, where: str = "") -> WalbrookError:
    """The meaning of an error, ``where`` it occurred."""
    code = error.code()
    what = f"Kafka refused {where or 'a message'} ({error.name()})"
    detail = error.str()[:_TEXT_MAX]
    if code in _LARGE:
        return PoisonError(
            what,
            fix="it becomes a dead letter; raise max.message.bytes of the topic, or bring the "
            "destination up to date by other means",
            kind=TOO_LARGE,
            detail=detail,
        )
    if code in _REFUSED:
        return PoisonError(
            what, fix="it becomes a dead letter; look at the topic's settings", detail=detail
        )
    if code in FENCING:
        return TransientError(
            "another process delivers under the transactional id of this sink",
            fix="it is retried; if it stays, two services share the sink: give one of them another "
            "cursor_topic",
            kind=FENCED,
            detail=detail,
        )
    if code in _FIXES:
        return OperatorError(what, fix=_FIXES[code], detail=detail)
    return TransientError(
        f"delivery to Kafka failed ({error.name()})",
        fix="it is retried; check that the brokers are up and reachable",
        detail=detail,
    )


def from_exception(error: BaseException) -> KafkaError:
    """The error in what the library raised."""
    if isinstance(error, KafkaException) and isinstance(error.args[0], KafkaError):
        return error.args[0]
    full = isinstance(error, BufferError)
    return KafkaError(KafkaError._QUEUE_FULL if full else KafkaError._FAIL)


Said = tuple[KafkaError | None, str | None]
"""An error, and the topic that it speaks of."""


def telling(said: Iterable[Said]) -> tuple[KafkaError, str | None]:
    """The first that is a cause, else the first that follows from one, else that time ran out."""
    known = [
        (error, topic)
        for error, topic in said
        if error is not None and error.code() not in _GIVEN_UP
    ]
    causes = [one for one in known if one[0].code() not in _CONSEQUENCES]
    return (causes or known or [(KafkaError(KafkaError._TIMED_OUT), None)])[0]


class Trouble:
    """What a client said of itself, outside of any call."""

    def __init__(self) -> None:
        self.error: KafkaError | None = None

    def noted(self, error: KafkaError) -> None:
        """Keep the last one, unless an earlier one needs an operator."""
        if not self.is_hopeless:
            self.error = error

    @property
    def is_hopeless(self) -> bool:
        """Whether no wait can help."""
        return self.error is not None and self.error.code() in _FIXES
