"""The service of one configuration file, from its locks to its end."""

from __future__ import annotations

import signal
import socket
import threading
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import FrameType

import structlog

from cdc.config.extras import check_extras
from cdc.logs import configure_logs
from cdc.reach import reach
from cdc.service.checks.event_time import check_event_time
from cdc.service.http.server import HttpServer, StandbyServer, listen
from cdc.service.live_config.applier import ConfigApplier
from cdc.service.live_config.file import ConfigCopy, ConfigFile
from cdc.service.live_config.plan import changed_since
from cdc.service.process.ownership import Ownership
from cdc.service.process.prepare import patiently, prepare_state
from cdc.service.process.repair import repair
from cdc.service.process.source_keeper import SourceKeeper, wait_for_sources
from cdc.service.process.supervisor import Supervisor
from cdc.state.configurations import give_up_requests, store_configuration
from cdc.stop import StopSignal


def serve(path: Path, stop: StopSignal, *, standby: bool = False) -> int:
    """Prepare the sources of a configuration and run its processes until ``stop``.

    A ``standby`` first waits until no other service serves them, and runs the file as it is then.
    SIGHUP has the file applied as it is at that time.
    """
    signalled = _on_hangup()
    file = ConfigFile.read(path)
    settings = file.config
    check_extras(settings.sinks)
    configure_logs(settings.service)
    logger = structlog.get_logger("walbrook.start")
    # What does not fit the tables of a source concerns its sink alone, whose worker says so.
    for unchecked in check_event_time(settings, form_alone=True):
        logger.warning("config.unchecked", what=unchecked)
    with ExitStack() as held:
        http, ownership = settings.service.http, Ownership(settings)
        if not standby:
            patiently(lambda: held.enter_context(ownership), stop)
        listener = held.enter_context(listen(http)) if http.enabled else None
        if standby:
            taken = _stand_by(file, listener, stop)
            if taken is None:
                return 0
            file, ownership = taken
            settings = file.config
            held.enter_context(ownership)
        patiently(lambda: prepare_state(settings), stop)
        revision = patiently(lambda: _stored(file), stop)
        copy = ConfigCopy(file)
        held.callback(copy.remove)
        sources = {base.name: SourceKeeper(settings, base) for base in settings.databases}
        for keeper in sources.values():
            held.callback(keeper.close)
        wait_for_sources(sources.values(), stop)
        supervisor = Supervisor(settings, copy.path, sources, base=copy.base, revision=revision)
        applier = ConfigApplier(file, revision, copy, supervisor, sources, ownership, signalled)
        held.callback(applier.close)
        if listener is not None:
            held.enter_context(
                HttpServer(
                    http,
                    settings.state_dsn(),
                    supervisor,
                    sources=supervisor.source_names,
                    listener=listener,
                    started_at=time.monotonic(),
                    measured=supervisor,
                    config=lambda: applier.config,
                    begin_repair=lambda name, deletes: repair(
                        applier.config, name, deletes=deletes
                    ),
                )
            )
        return supervisor.run(stop, ownership.keep)


def _stored(file: ConfigFile) -> int:
    """Note what runs from this start on. Returns its revision."""
    with reach(file.config.state_dsn(), file.config.state_called()) as state:
        give_up_requests(state, file.sources)
        return store_configuration(state, file.sources, str(file.path), file.document(), "start")


def _on_hangup() -> threading.Event:
    """An event that SIGHUP sets from now on."""
    signalled = threading.Event()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        signalled.set()

    signal.signal(signal.SIGHUP, handle)
    return signalled


def _stand_by(
    file: ConfigFile, listener: socket.socket | None, stop: StopSignal
) -> tuple[ConfigFile, Ownership] | None:
    """Wait for the locks, and say over HTTP that this is a standby.

    Returns the file as it is at the takeover, and who holds its locks; None if a stop came first.
    """
    logger = structlog.get_logger("walbrook.start")
    with nullcontext() if listener is None else StandbyServer(listener):
        logger.info("standby.waiting")
        while (ownership := Ownership(file.config)).stand_by(stop):
            before, file = file, changed_since(file)
            if set(file.sources) == set(before.sources):
                logger.info("standby.takes_over")
                return file, ownership
            ownership.release()  # others serve its databases as they are now, or may
    return None
