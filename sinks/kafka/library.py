"""The client library, which is an extra: without it an error names the extra.

Invariant: no other module imports it, so that this error is the only one that a user without it
can meet.
"""

from __future__ import annotations

from cdc.config.extras import missing_extra

try:
    import confluent_kafka
    import confluent_kafka.admin
except ModuleNotFoundError as error:
    raise missing_extra("kafka") from error

AdminClient = confluent_kafka.admin.AdminClient
NewTopic = confluent_kafka.admin.NewTopic  # type: ignore[attr-defined]
Consumer = confluent_kafka.Consumer
KafkaError = confluent_kafka.KafkaError
KafkaException = confluent_kafka.KafkaException
Message = confluent_kafka.Message
Producer = confluent_kafka.Producer
TopicPartition = confluent_kafka.TopicPartition

__all__ = [
    "AdminClient",
    "Consumer",
    "KafkaError",
    "KafkaException",
    "Message",
    "NewTopic",
    "Producer",
    "TopicPartition",
]
