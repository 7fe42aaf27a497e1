"""The configuration room: one YAML file in, one frozen ``Config`` out.

It owns the model, the reading of the file (interpolation included), the errors that send a person
to the right line, and the reference that is generated from the model. Nothing else in the project
reads the file or an environment variable named in it. Invariant: a ``Config`` that
exists is valid, and no secret appears in an error, a ``repr`` or what ``show`` prints.
"""

from cdc.config.database import Database, Publication, Slot
from cdc.config.destination import (
    Destination,
    FileDestination,
    KafkaDestination,
    PostgresDestination,
    PullDestination,
    RedisStreamDestination,
    Tls,
    WebhookDestination,
)
from cdc.config.display import show
from cdc.config.event_time import EventTime, TableTime, Window
from cdc.config.lakehouse import DeltaDestination, IcebergDestination, LakeDestination
from cdc.config.ledger import LedgerSettings
from cdc.config.load import load, loads
from cdc.config.log import Flight, Log, Tier
from cdc.config.model import Config
from cdc.config.parquet import ParquetDestination
from cdc.config.secrets import SecretText
from cdc.config.settings import ApiToken, Http, Service, Spark, State
from cdc.config.sink import SinkConfig
from cdc.config.sink_parts import Source
from cdc.config.table import TableName

__all__ = [
    "ApiToken",
    "Config",
    "Database",
    "DeltaDestination",
    "Destination",
    "EventTime",
    "FileDestination",
    "Flight",
    "Http",
    "IcebergDestination",
    "KafkaDestination",
    "LakeDestination",
    "LedgerSettings",
    "Log",
    "ParquetDestination",
    "PostgresDestination",
    "Publication",
    "PullDestination",
    "RedisStreamDestination",
    "SecretText",
    "Service",
    "SinkConfig",
    "Slot",
    "Source",
    "Spark",
    "State",
    "TableName",
    "TableTime",
    "Tier",
    "Tls",
    "WebhookDestination",
    "Window",
    "load",
    "loads",
    "show",
]
