"""The jars of a Kafka broker and of Kafka Connect's converter.

``python -m tests.kafka_jars`` fetches them and prints where they are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tests.maven_jars import Jar, NoJarsError, fetched

BROKER_RELEASE: Final = "4.3.1"
DEBEZIUM_RELEASE: Final = "3.2.4.Final"

_JARS = [
    Jar("org.apache.kafka", "kafka_2.13", BROKER_RELEASE),
    Jar("org.apache.kafka", "connect-json", BROKER_RELEASE),
    Jar("org.apache.kafka", "connect-transforms", BROKER_RELEASE),
    # What these depend on is far more than one class needs.
    Jar("io.debezium", "debezium-core", DEBEZIUM_RELEASE, alone=True),
    Jar("io.debezium", "debezium-api", DEBEZIUM_RELEASE, alone=True),
    Jar("io.debezium", "debezium-common", DEBEZIUM_RELEASE, alone=True),
]


def kafka_jars() -> Path:
    """The folder with the jars, fetched if it is not there yet."""
    return fetched(f"kafka-connect-{BROKER_RELEASE}-{DEBEZIUM_RELEASE}", _JARS)


if __name__ == "__main__":
    try:
        print(kafka_jars())
    except NoJarsError as missing:
        sys.exit(str(missing))
