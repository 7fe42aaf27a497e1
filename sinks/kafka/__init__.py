"""Kafka, and whatever speaks its protocol: Event Hubs, Redpanda, MSK.

``records`` makes of a batch what is produced, ``client`` the settings of the client library,
``errors`` gives its errors a meaning. ``at_least_once`` and ``exactly_once`` are the two sinks.
"""

from __future__ import annotations

from sinks.kafka.at_least_once import KafkaSink
from sinks.kafka.client import client_settings
from sinks.kafka.exactly_once import ExactlyOnceKafkaSink
from sinks.kafka.records import RecordForm
from sinks.kafka.topics import NewTopics

__all__ = ["ExactlyOnceKafkaSink", "KafkaSink", "NewTopics", "RecordForm", "client_settings"]
