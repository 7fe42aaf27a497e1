"""``walbrook run``: the service of one configuration file, from its start to its stop."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import structlog

from cdc.config.extras import check_extras
from cdc.logs import configure_logs
from cdc.reach import reach
from cdc.service.checks.event_time import check_event_time
from cdc.service.http.server import HttpServer, listen
from cdc.service.live_config.applier import ConfigApplier
from cdc.service.live_config.file import ConfigCopy, ConfigFile
from cdc.service.process.ownership import Ownership
from cdc.service.process.prepare import patiently, prepare_state, state_called
from cdc.service.process.repair import repair
from cdc.service.process.source_keeper import SourceKeeper, wait_for_sources
from cdc.service.process.supervisor import Supervisor
from cdc.state.configurations import give_up_requests, store_configuration
from cdc.stop import StopSignal


def serve(path: Path, stop: StopSignal) -> int:
    """Prepare the sources of a configuration and run its processes until ``stop``.

    SIGHUP has the file applied as it is then.
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
        ownership = patiently(lambda: held.enter_context(Ownership(settings)), stop)
        http = settings.service.http
        listener = held.enter_context(listen(http)) if http.enabled else None
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
                    begin_repair=lambda name, deletes: repair(
                        applier.config, name, deletes=deletes
                    ),
                )
            )
        return supervisor.run(stop, ownership.keep)


def _stored(file: ConfigFile) -> int:
    """Note what runs from this start on. Returns its revision."""
    with reach(file.config.state_dsn(), state_called(file.config)) as state:
        give_up_requests(state, file.sources)
        return store_configuration(state, file.sources, str(file.path), file.document(), "start")


def _on_hangup() -> threading.Event:
    """An event that SIGHUP sets from now on."""
    signalled = threading.Event()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        signalled.set()

    signal.signal(signal.SIGHUP, handle)
    return signalled
