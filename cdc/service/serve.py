"""The service of one configuration, from its locks to its end."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import structlog

from cdc.config import load
from cdc.config.extras import check_extras
from cdc.logs import configure_logs
from cdc.service.checks.event_time import check_event_time
from cdc.service.http.server import HttpServer, listen
from cdc.service.process.ownership import Ownership
from cdc.service.process.prepare import patiently, prepare_state
from cdc.service.process.repair import repair
from cdc.service.process.source_keeper import SourceKeeper, wait_for_sources
from cdc.service.process.supervisor import Supervisor
from cdc.stop import StopSignal


def serve(path: Path, stop: StopSignal) -> int:
    """Prepare the sources of a configuration and run its processes until ``stop``."""
    settings = load(path)
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
        sources = {base.name: SourceKeeper(settings, base) for base in settings.databases}
        for keeper in sources.values():
            held.callback(keeper.close)
        wait_for_sources(sources.values(), stop)
        supervisor = Supervisor(settings, path.resolve(), sources)
        if listener is not None:
            held.enter_context(
                HttpServer(
                    http,
                    settings.state_dsn(),
                    supervisor,
                    sources=[*sources],
                    listener=listener,
                    started_at=time.monotonic(),
                    begin_repair=lambda name, deletes: repair(settings, name, deletes=deletes),
                )
            )
        return supervisor.run(stop, ownership.keep)
