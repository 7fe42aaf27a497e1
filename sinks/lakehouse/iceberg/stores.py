"""Files in an object store as the Iceberg library reads and writes them, by pyarrow alone.

A location on Azure's store may have the account behind the container, as other engines write it:
``abfss://container@account.dfs.core.windows.net/folder``. The library takes both for the name of
the container.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sinks.lakehouse.iceberg import library as iceberg

_AZURE: Final = ("abfs", "abfss")


def account_in(location: str) -> str | None:
    """The account that a location on Azure's store names."""
    scheme, _, rest = location.partition("://")
    account = rest.partition("/")[0].partition("@")[2].partition(".")[0]
    return account if scheme in _AZURE and account else None


class StoreFileIO(iceberg.PyArrowFileIO):
    """The library's setting for tables in a store."""

    @staticmethod
    def parse_location(
        location: str, properties: Mapping[str, str] | None = None
    ) -> tuple[str, str, str]:
        """Scheme, bucket or container, and the path that begins with it."""
        scheme, netloc, path = iceberg.PyArrowFileIO.parse_location(
            location, dict(properties or {})
        )
        container = netloc.partition("@")[0]
        if scheme not in _AZURE or container == netloc:
            return scheme, netloc, path
        return scheme, container, f"{container}{path.removeprefix(netloc)}"
