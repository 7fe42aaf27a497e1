"""Making appended batches durable, in a thread, and saying up to where they are.

Invariant: ``durable_end`` is never ahead of a finished sync. After a sync that failed
it never moves again, because the kernel may have dropped what it could not write: the log must be
reopened, which writes what is left of it afresh.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import xxhash

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError, TransientError
from cdc.failpoints import reached
from cdc.log.files import FILE_MODE, sync_directory

Durability = Literal["memory", "disk", "fsync"]

FILE_NAME = "durable"
_CURSOR, _CHECK = struct.Struct("<qq"), struct.Struct("<Q")
_BYTES = _CURSOR.size + _CHECK.size
_DISK_INTERVAL_S = 1.0
_DISK_BYTES = 16 << 20  # not all at once when the segment is sealed


def read_durable(directory: Path) -> Cursor:
    """Up to where the log was on disk at its last sync; the origin if it never was."""
    try:
        data = (directory / FILE_NAME).read_bytes()
    except FileNotFoundError:
        return ORIGIN
    if not data:
        return ORIGIN  # just created
    if data != _packed(data[: _CURSOR.size]):
        raise CorruptionError(
            f"{directory / FILE_NAME} does not match its checksum",
            fix="nothing need be done: the next sync of the log writes it again",
        )
    return Cursor(*_CURSOR.unpack_from(data))


def _packed(fields: bytes) -> bytes:
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


class Syncer:
    """Syncs the active segment: at once (``fsync``), about each second (``disk``), or never."""

    def __init__(
        self,
        directory: Path,
        durability: Durability,
        end: Cursor,
        lost: Cursor | None = None,
        *,
        on_synced: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        """All up to ``end`` is on disk; if more was, up to ``lost``, that is not forgotten.

        ``on_synced`` gets how long each sync took.
        """
        self._directory = directory
        self._on_synced = on_synced
        self._wait_s = 0.0 if durability == "fsync" else _DISK_INTERVAL_S
        self._changed = threading.Condition()
        # Held while descriptors are synced, so that they are not closed meanwhile.
        self._syncing = threading.Lock()
        self._files: tuple[int, ...] = ()
        self._new_files = False
        self._written = self._durable = end
        # Appends so far, and those that the last sync reached: a batch need not move the cursor.
        self._appended = self._synced = self._unsynced_bytes = 0
        self._failure: OSError | None = None
        self._stopping = False
        self._handle = os.open(
            directory / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode=FILE_MODE
        )
        self._thread: threading.Thread | None = None
        try:
            self._publish(lost or end)
            if os.fstat(self._handle).st_size > _BYTES:
                os.ftruncate(self._handle, _BYTES)
        except OSError:
            os.close(self._handle)
            raise
        if durability != "memory":
            self._thread = threading.Thread(target=self._run, name="log-sync", daemon=True)
            self._thread.start()

    @property
    def durable_end(self) -> Cursor:
        return self._durable

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def check(self) -> None:
        """Raise if a sync failed: from then on nothing more may be appended."""
        if self._failure is not None:
            raise TransientError(
                f"the log in {self._directory} could not be synced: {self._failure.strerror}",
                fix="check that disk; the log must be reopened before reading goes on",
                kind="log_sync_failed",
            ) from self._failure

    def fail(self, error: OSError) -> None:
        """Something else that must be on disk could not be synced."""
        with self._syncing:
            self._failure = self._failure or error

    def attach(self, *files: int) -> None:
        """From now on sync these; the earlier ones are no longer in use when this returns."""
        with self._syncing:
            self._files, self._new_files = files, bool(files)

    def written(self, end: Cursor, size: int) -> None:
        """Everything up to ``end``, with ``size`` more bytes, was handed to the kernel."""
        with self._changed:
            is_first = self._appended == self._synced
            self._written = end
            self._appended += 1
            self._unsynced_bytes += size
            # A sync at its own pace need not wake up for each batch.
            if is_first or self._due():
                self._changed.notify()

    def flush(self) -> None:
        """Sync now, in the caller's thread; a failure is a TransientError, now and ever after."""
        self._sync()
        self.check()

    def lower(self, end: Cursor) -> None:
        """The log is about to be cut: what is gone must not be missed after a crash."""
        with self._syncing:
            self._publish(end)
            os.fsync(self._handle)

    def restart(self, end: Cursor) -> None:
        """The log was cut or emptied: all that is left is on disk and ends at ``end``."""
        with self._syncing, self._changed:
            self._written = self._durable = end
            self._synced = self._appended
            self._publish(end)

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        os.close(self._handle)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._appended > self._synced)
                # One sync takes along whatever comes until it starts.
                if self._wait_s:
                    self._changed.wait_for(self._due, self._wait_s)
                if self._stopping:
                    return
            self._sync()
            if self._failure is not None:
                return

    def _due(self) -> bool:
        return self._stopping or self._unsynced_bytes >= _DISK_BYTES

    def _sync(self) -> None:
        with self._syncing:
            with self._changed:
                written, appended = self._written, self._appended
                self._unsynced_bytes = 0
            if self._failure is not None or appended == self._synced:
                return
            began = time.monotonic()
            try:
                for handle in self._files:
                    os.fdatasync(handle)
                if self._new_files:
                    sync_directory(self._directory)
                    self._new_files = False
            except OSError as error:
                self._failure = error
                return
            with self._changed:
                self._durable, self._synced = written, appended
            self._publish(written)
            self._on_synced(time.monotonic() - began)
            reached("synced")

    def _publish(self, end: Cursor) -> None:
        # Others only look at it: the log itself does not depend on it.
        with suppress(OSError):
            os.pwrite(self._handle, _packed(_CURSOR.pack(*end)), 0)
