"""Where the content of oversize messages is kept: a folder of any filesystem, or a table.

Invariants: what ``put`` returned the location of is safe. To put the same content under the same
name again changes nothing for readers. ``clean`` removes only what is older than it is kept, a
bounded number of it at a time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Protocol, Self
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa
import pyarrow.fs as pafs

from cdc.config import SinkConfig
from cdc.connection_pool import ConnectionPool
from cdc.error_text import public_text
from cdc.errors import OperatorError, TransientError, WalbrookError
from sinks.directory import disk_error, make_directories, publish

_PUT = """
INSERT INTO walbrook.claim_checks (location, consumer, payload) VALUES (%s, %s, %s)
    ON CONFLICT (location) DO UPDATE SET stored_at = clock_timestamp()
"""
# What another process removes, or stores again, at this moment is left to it.
_CLEAN = """
DELETE FROM walbrook.claim_checks WHERE location IN (
       SELECT location FROM walbrook.claim_checks
        WHERE consumer = %s AND stored_at < clock_timestamp() - make_interval(days => %s)
        ORDER BY stored_at LIMIT %s FOR UPDATE SKIP LOCKED)
"""
_CLEANED_MAX = 1_000  # rows by one statement: each may have megabytes
_PROBE = "SELECT has_table_privilege(to_regclass('walbrook.claim_checks'), 'INSERT')"
_TABLE = "postgres:walbrook.claim_checks"
_S3_ERROR = re.compile(r"AWS Error (\w+) during")
_S3_FIXES = {
    "NO_SUCH_BUCKET": "create the bucket, or correct claim_check.url of the sink",
    **dict.fromkeys(
        ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH"),
        "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the service, and let that account "
        "read, write, list and delete below claim_check.url",
    ),
}
_UNTRUSTED = "curlCode: 60"


@dataclass(frozen=True)
class ClaimPlace:
    """What a sink with oversize: claim_check says of it; without a URL it is a table."""

    message_bytes_max: int
    retain_days: int
    url: str | None
    state_dsn: str = field(repr=False)

    @classmethod
    def of(cls, consumer: SinkConfig, state_dsn: str) -> Self | None:
        """As the configuration says; None for a sink that has none."""
        claims, largest = consumer.claims, consumer.effective_max_message_bytes
        if claims is None or largest is None:
            return None
        return cls(largest, claims.retain_days, claims.url, state_dsn)


class ClaimStore(Protocol):
    def put(self, consumer: str, name: str, payload: bytes) -> str:
        """Store the content. Returns its location, which holds no secret."""
        ...

    def clean(self, consumer: str, retain_days: int) -> bool:
        """Remove some of what is older than it is kept. Returns whether there may be more."""
        ...

    def probe(self) -> None:
        """Raises if the store does not answer; changes nothing."""
        ...

    def close(self) -> None: ...


def open_store(place: ClaimPlace) -> ClaimStore:
    return TableClaims(place.state_dsn) if place.url is None else FolderClaims(place.url)


class FolderClaims:
    """A folder per consumer and day below a URL; whole days are removed."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        # Options of the filesystem stand behind the question mark: no one else may see them.
        self._shown = parts._replace(query="", fragment="").geturl().rstrip("/")
        try:
            self._files, self._root = pafs.FileSystem.from_uri(_in_one_request(url))
        except (OSError, pa.ArrowException) as error:
            raise OperatorError(
                f"the store of oversize messages at {self._shown} cannot be opened",
                fix="correct claim_check.url of the sink",
                detail=str(error),
            ) from error
        self._is_local = isinstance(self._files, pafs.LocalFileSystem)

    def put(self, consumer: str, name: str, payload: bytes) -> str:
        place = f"{consumer}/{_today().isoformat()}/{name}.json"
        path = f"{self._root}/{place}"
        try:
            if self._is_local:
                make_directories(Path(path).parent)
                publish(Path(path), payload)
            else:
                with self._files.open_output_stream(path) as out:
                    out.write(payload)
        except (OSError, pa.ArrowException) as error:
            raise self._error(error) from error
        return f"{self._shown}/{place}"

    def clean(self, consumer: str, retain_days: int) -> bool:
        kept = _today() - timedelta(days=retain_days)
        folder = pafs.FileSelector(f"{self._root}/{consumer}", allow_not_found=True)
        try:
            for found in self._files.get_file_info(folder):
                day = _day(found.base_name)
                if day is not None and day < kept:
                    self._files.delete_dir(found.path)
        except (OSError, pa.ArrowException) as error:
            raise self._error(error) from error
        return False

    def probe(self) -> None:
        # A folder need not exist; a bucket must.
        is_s3 = isinstance(self._files, pafs.S3FileSystem)
        place = self._root.partition("/")[0] if is_s3 else self._root
        try:
            found = self._files.get_file_info(place)
        except (OSError, pa.ArrowException) as error:
            raise self._error(error) from error
        if is_s3 and found.type == pafs.FileType.NotFound:
            raise self._refusal("NO_SUCH_BUCKET")

    def close(self) -> None:
        """Nothing stays open."""

    def _error(self, error: Exception) -> WalbrookError:
        if self._is_local and isinstance(error, OSError):
            return disk_error(Path(self._root), error)
        text = str(error)
        named = _S3_ERROR.search(text)
        if named is not None and named[1] in _S3_FIXES:
            return self._refusal(named[1], text)
        if _UNTRUSTED in text:
            return OperatorError(
                f"the store of oversize messages at {self._shown} has a certificate that is not "
                "trusted",
                fix="add tls_ca_file_path=<file> to the options of claim_check.url",
                detail=text,
            )
        return TransientError(
            f"the store of oversize messages at {self._shown} does not take them"
            + (f": {named[1]}" if named is not None else ""),
            fix="it is retried; check that it can be reached and written to",
            detail=text,
        )

    def _refusal(self, code: str, detail: str = "") -> OperatorError:
        return OperatorError(
            f"the store of oversize messages at {self._shown} refuses them: {code}",
            fix=_S3_FIXES[code],
            detail=detail,
        )


class TableClaims:
    """The table walbrook.claim_checks of the state database."""

    def __init__(self, dsn: str) -> None:
        self._connections = ConnectionPool(dsn, name="claims")

    def put(self, consumer: str, name: str, payload: bytes) -> str:
        location = f"{_TABLE}/{consumer}/{name}"
        self._execute(_PUT, location, consumer, payload)
        return location

    def clean(self, consumer: str, retain_days: int) -> bool:
        return self._execute(_CLEAN, consumer, retain_days, _CLEANED_MAX) == _CLEANED_MAX

    def probe(self) -> None:
        self._execute(_PROBE)

    def close(self) -> None:
        self._connections.close()

    def _execute(self, statement: str, *arguments: object) -> int:
        """Returns how many rows it concerned."""
        try:
            with self._connections.connection() as connection:
                return connection.execute(statement.encode(), arguments).rowcount
        except (psycopg.errors.UndefinedTable, psycopg.errors.InsufficientPrivilege) as error:
            raise OperatorError(
                f"oversize messages cannot be stored in the state database: {public_text(error)}",
                fix="run walbrook migrate; let the role of state.url write in schema walbrook",
            ) from error
        except psycopg.Error as error:
            raise TransientError(
                f"oversize messages cannot be stored in the state database: {public_text(error)}",
                fix="it is retried; check that the database runs and has room",
            ) from error


def _in_one_request(url: str) -> str:
    """The same; S3 is then sent what fits into one request in one, not in three."""
    parts = urlsplit(url)
    if parts.scheme != "s3" or "allow_delayed_open" in parts.query:
        return url
    options = [parts.query] if parts.query else []
    return parts._replace(query="&".join([*options, "allow_delayed_open=true"])).geturl()


def _today() -> date:
    return datetime.now(UTC).date()


def _day(name: str) -> date | None:
    try:
        return date.fromisoformat(name)
    except ValueError:
        return None
