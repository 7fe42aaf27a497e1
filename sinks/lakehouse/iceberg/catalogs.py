"""Catalogs that tell an Iceberg table's readers where its metadata is, opened by their settings.

Invariant: whoever gets an error sees no secret of a catalog or a store in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sinks.lakehouse.iceberg import library as iceberg
from sinks.lakehouse.iceberg.disk import SyncedFiles
from sinks.lakehouse.iceberg.errors import telling

_OF_STORES: Final = {
    "AWS_ENDPOINT_URL": "s3.endpoint",
    "AWS_REGION": "s3.region",
    "AWS_ACCESS_KEY_ID": "s3.access-key-id",
    "AWS_SECRET_ACCESS_KEY": "s3.secret-access-key",
    "AWS_SESSION_TOKEN": "s3.session-token",
}
"""Names that other tools have for options of stores, and those that the library has."""


def open_catalog(
    name: str, properties: Mapping[str, str], root: str, storage_options: Mapping[str, str]
) -> iceberg.Catalog:
    """The catalog with these properties, whose tables lie below ``root``."""
    given = {_OF_STORES.get(key, key): value for key, value in storage_options.items()}
    if "://" not in root or root.startswith("file://"):
        given["py-io-impl"] = f"{SyncedFiles.__module__}.{SyncedFiles.__qualname__}"
    with telling(root):
        return iceberg.load_catalog(name, **{**given, **properties})
