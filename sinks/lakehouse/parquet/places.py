"""The folder of one table, on a disk or in an object store.

Invariants: what ``write`` and ``put`` returned from is durable; a reader sees a file whole or not
at all; ``put`` replaces an object only while it is the one that was read, whatever others
write.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import xxhash

from cdc.errors import OperatorError
from sinks.directory import (
    locked,
    make_directories,
    new_holder,
    probe_directory,
    publish,
    sync_directory,
)
from sinks.lakehouse.files import encode, read_columns
from sinks.lakehouse.store_errors import refused_by_store, unavailable
from sinks.lakehouse.table import ConflictError

if TYPE_CHECKING:
    from obstore import Bytes

_LOCK = "_walbrook.lock"
_LOCK_WAIT_S = 30.0
_RETRIES = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}  # the consumer goes on later
_REMOVED_AT_ONCE = 1000
_NO_TAG = '"00000000000000000000000000000000"'
_CLIENT_OPTIONS = frozenset(
    {
        "allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only",
        "pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes",
        "proxy_url", "read_timeout", "root_certificate", "timeout", "user_agent",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """An object that is replaced in one step; ``tag`` tells it from what replaces it."""

    content: bytes
    tag: Mapping[str, str]


@dataclass(frozen=True)
class Listed:
    """A file in the folder."""

    path: str
    modified_s: float


class Place(Protocol):
    """Paths are relative to the folder."""

    @property
    def name(self) -> str:
        """Where it is, without secrets."""
        ...

    def probe(self) -> str:
        """Look at it, and write nothing. Returns what was found, in one line."""
        ...

    def get(self, path: str) -> Stored | None: ...

    def put(self, path: str, content: bytes, known: Stored | None) -> Stored:
        """In place of what is ``known`` to be there. Raises ConflictError if that is not so."""
        ...

    def check_conditions(self, path: str, known: Stored) -> None:
        """OperatorError for a store that would put although the condition does not hold."""
        ...

    def write(self, path: str, rows: pa.Table) -> int:
        """A new Parquet file. Returns how many bytes it has."""
        ...

    def read(self, path: str) -> pa.Table | None:
        """The rows of a Parquet file; None if it is gone."""
        ...

    def listed(self) -> Iterator[Listed]:
        """All files in the folder, those of others too."""
        ...

    def remove(self, paths: list[str]) -> None: ...

    def drop(self, path: str) -> None:
        """Remove all that is there, this path first; there may be nothing."""
        ...


class DiskPlace:
    """A folder on a disk."""

    def __init__(self, folder: Path, compression: str) -> None:
        self._folder = folder
        self._compression = compression
        self._holder = new_holder()
        self._durable: bytes | None = None

    @property
    def name(self) -> str:
        return str(self._folder)

    def probe(self) -> str:
        return f"{self._folder} {probe_directory(self._folder)}"

    def get(self, path: str) -> Stored | None:
        try:
            content = (self._folder / path).read_bytes()
        except FileNotFoundError:
            return None
        if content != self._durable:
            # The writer of this may have died between the rename and making it last.
            sync_directory(self._folder)
            self._durable = content
        return _stored(content)

    def put(self, path: str, content: bytes, known: Stored | None) -> Stored:
        make_directories((self._folder / path).parent)
        with locked(self._folder / _LOCK, wait_s=_LOCK_WAIT_S, holder=self._holder):
            there = self.get(path)
            if (there and there.tag) != (known and known.tag):
                raise _overtaken(self.name)
            publish(self._folder / path, content)
        self._durable = content
        return _stored(content)

    def check_conditions(self, path: str, known: Stored) -> None:
        """A lock and a rename have them."""

    def write(self, path: str, rows: pa.Table) -> int:
        out = pa.BufferOutputStream()
        encode(rows, out, self._compression)
        data = memoryview(out.getvalue())
        place = self._folder / path
        make_directories(place.parent)
        publish(place, data)
        return len(data)

    def read(self, path: str) -> pa.Table | None:
        try:
            with pa.memory_map(str(self._folder / path)) as opened:
                return read_columns(opened, None)
        except FileNotFoundError:
            return None

    def listed(self) -> Iterator[Listed]:
        for path in self._folder.rglob("*"):
            if path.is_file():
                relative = path.relative_to(self._folder).as_posix()
                yield Listed(relative, path.stat().st_mtime)

    def remove(self, paths: list[str]) -> None:
        for path in paths:
            (self._folder / path).unlink(missing_ok=True)
        for folder in {(self._folder / path).parent for path in paths}:
            with suppress(OSError):  # it has other files
                folder.rmdir()

    def drop(self, path: str) -> None:
        if self._folder.is_dir():
            (self._folder / path).unlink(missing_ok=True)
            sync_directory(self._folder)
            shutil.rmtree(self._folder)
            sync_directory(self._folder.parent)


class StorePlace:
    """A prefix in an object store."""

    def __init__(self, url: str, options: Mapping[str, str], compression: str) -> None:
        # Its library is an extra, and only stores need it.
        from sinks.lakehouse.parquet import library

        self._library = library
        self._url = url
        self._compression = compression
        settings, client = _settings(options)
        with self._telling():
            self._store = library.from_url(  # type: ignore[call-overload]
                url, config=settings, client_options=client, retry_config=_RETRIES
            )

    @property
    def name(self) -> str:
        return self._url

    def probe(self) -> str:
        self.get("_manifest.json")
        return f"{self._url} can be asked; whether it can be written to was not tried"

    def get(self, path: str) -> Stored | None:
        found = self._got(path)
        return None if found is None else Stored(found[0].to_bytes(), found[1])

    def put(self, path: str, content: bytes, known: Stored | None) -> Stored:
        mode = "create" if known is None else dict(known.tag)
        library = self._library
        with self._telling():
            try:
                found = library.put(self._store, path, content, mode=mode)
            except (library.AlreadyExistsError, library.PreconditionError) as error:
                raise _overtaken(self._url) from error
            return Stored(content, _tag(found))

    def check_conditions(self, path: str, known: Stored) -> None:
        other = Stored(known.content, {**dict.fromkeys(known.tag, "1"), "e_tag": _NO_TAG})
        for condition in (None, other):
            try:
                self.put(path, known.content, condition)
            except ConflictError:
                continue
            self.remove([path])
            raise OperatorError(
                f"the store of the table at {self._url} ignores the condition of a put, so two "
                "writers could both count as the only one",
                fix="use a store that has If-None-Match and If-Match for PutObject",
                kind="no_conditional_put",
            )

    def write(self, path: str, rows: pa.Table) -> int:
        out = pa.BufferOutputStream()
        encode(rows, out, self._compression)
        data = out.getvalue()
        with self._telling():
            self._library.put(self._store, path, pa.BufferReader(data))
        return int(data.size)

    def read(self, path: str) -> pa.Table | None:
        found = self._got(path)
        return (
            None if found is None else read_columns(pa.BufferReader(pa.py_buffer(found[0])), None)
        )

    def listed(self) -> Iterator[Listed]:
        with self._telling():
            for found in (each for some in self._library.listed(self._store) for each in some):
                yield Listed(found["path"], found["last_modified"].timestamp())

    def remove(self, paths: list[str]) -> None:
        with self._telling():
            for at in range(0, len(paths), _REMOVED_AT_ONCE):
                self._library.delete(self._store, paths[at : at + _REMOVED_AT_ONCE])

    def drop(self, path: str) -> None:
        if self._got(path) is not None:
            self.remove([path])
        self.remove([each.path for each in self.listed()])

    def _got(self, path: str) -> tuple[Bytes, dict[str, str]] | None:
        with self._telling():
            try:
                found = self._library.get(self._store, path)
            except FileNotFoundError as error:
                if (refused := refused_by_store(str(error), self._url)) is not None:
                    raise refused from None
                return None
            return found.bytes(), _tag(found.meta)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        library = self._library
        try:
            yield
        except library.UnknownConfigurationKeyError as error:
            raise OperatorError(
                "storage_options has a name that the store does not know",
                fix="use the names of the store, such as AWS_REGION or AWS_ENDPOINT_URL",
                detail=str(error),
            ) from None
        except (library.BaseError, OSError) as error:
            raise refused_by_store(str(error), self._url) or unavailable(error, self._url) from None


def open_place(place: str, options: Mapping[str, str], compression: str) -> Place:
    """A folder of a disk, or of a store if it is a URL."""
    if "://" in place:
        return StorePlace(place, options, compression)
    return DiskPlace(Path(place), compression)


def _settings(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Options of the store, and those of its HTTP client, which may have the prefix of a store."""
    settings, client = {}, {}
    for name, value in options.items():
        plain = re.sub(r"^(aws|google|azure)_", "", name.lower())
        if plain in _CLIENT_OPTIONS:
            client[plain] = value
        else:
            settings[name] = value
    return settings, client


def _tag(found: Mapping[str, object]) -> dict[str, str]:
    return {name: str(found[name]) for name in ("e_tag", "version") if found.get(name) is not None}


def _stored(content: bytes) -> Stored:
    return Stored(content, {"hash": xxhash.xxh3_128_hexdigest(content)})


def _overtaken(place: str) -> ConflictError:
    return ConflictError(f"another writer has changed the table at {place}", fix="it is retried")
