"""A folder in an object store, as tests give it to sinks and look into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import obstore
import orjson


@dataclass(frozen=True)
class Store:
    """``options`` are those of delta-rs and obstore; pyiceberg has names of its own for some."""

    url: str
    options: Mapping[str, str]
    iceberg: Mapping[str, str] = field(default_factory=dict)

    def __truediv__(self, folder: str) -> Store:
        """The same store, a folder below."""
        return Store(f"{self.url}/{folder}", self.options, self.iceberg)

    def names(self) -> list[str]:
        """All files in the folder, by their paths in it."""
        found = [each["path"] for some in obstore.list(self._opened()) for each in some]
        return sorted(found)

    def read(self, name: str) -> bytes:
        return obstore.get(self._opened(), name).bytes().to_bytes()

    def write(self, name: str, content: bytes) -> None:
        account = self.options.get("GOOGLE_SERVICE_ACCOUNT_KEY")
        if account is None:
            obstore.put(self._opened(), name, content)
            return
        # The server of the tests takes uploads by Google's own interface alone.
        bucket, _, folder = self.url.removeprefix("gs://").partition("/")
        httpx.post(
            f"{orjson.loads(account)['gcs_base_url']}/upload/storage/v1/b/{bucket}/o",
            params={"uploadType": "media", "name": f"{folder}/{name}"},
            content=content,
        ).raise_for_status()

    def copied(self, to: Path) -> Path:
        """A copy of all files on this disk; Parquet files never change and are copied once."""
        opened = self._opened()
        for name in self.names():
            copy = to / name
            if copy.exists() and copy.suffix == ".parquet":
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                content = obstore.get(opened, name).bytes().to_bytes()
            except FileNotFoundError:
                continue  # a maintainer has removed it
            copy.write_bytes(content)
        return to

    def _opened(self) -> obstore.store.ObjectStore:
        config = {name: value for name, value in self.options.items() if "ALLOW_HTTP" not in name}
        return obstore.store.from_url(  # type: ignore[call-overload,no-any-return]
            self.url, config=config, client_options={"allow_http": True}
        )
