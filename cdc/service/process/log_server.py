"""The log's server as a process: ``python -m cdc.service.process.log_server CONFIG``.

Started by the supervisor, which holds the other end of our standard input and hands over the
token of the run in the environment. It serves the log directories of all sources of the
configuration; those that do not exist yet are served once they do.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import structlog

from cdc.config import Config, load
from cdc.config.hosts import is_loopback
from cdc.errors import OperatorError, WalbrookError, exit_status
from cdc.log.flight.server import LogServer, ServerTls
from cdc.log.flight.wire import TOKEN_VARIABLE
from cdc.logs import configure_logs, log_end
from cdc.stop import StopSignal

_logger = structlog.get_logger("walbrook.log_server")

_LOOK_S = 60.0
_CLOSE_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="cdc.service.process.log_server")
    parser.add_argument("config", type=Path)
    parser.add_argument("--base", type=Path, help="where relative paths in CONFIG begin")
    arguments = parser.parse_args()
    config = load(arguments.config, base=arguments.base)
    configure_logs(config.service)

    stop = StopSignal()
    stop.on_signals()
    stop.on_parent_death()
    try:
        server = _open(config)
    except WalbrookError as error:
        log_end("log server", error)
        return exit_status(error)
    while not stop.wait(_LOOK_S):
        pass
    if not server.close(_CLOSE_S):
        # A client that does not read its stream holds a thread that nothing else can end.
        _logger.warning("log_server.left_calls", waited_s=_CLOSE_S)
        sys.stderr.flush()
        os._exit(0)
    return 0


def _open(config: Config) -> LogServer:
    settings = config.log.flight
    tls = None
    if settings.certificate is not None and settings.private_key is not None:
        tls = ServerTls(_read(settings.certificate), _read(settings.private_key))
    if tls is None and not is_loopback(settings.host):
        _logger.warning(
            "log_server.not_encrypted",
            host=settings.host,
            fix="set log.flight.certificate and log.flight.private_key: the token and all changes "
            "pass the network as they are",
        )
    directories = {base.name: config.log.directory / base.name for base in config.databases}
    server = LogServer(
        directories,
        token=os.environ.get(TOKEN_VARIABLE, ""),
        host=settings.host,
        port=settings.port,
        tls=tls,
    )
    _logger.info(
        "log_server.listening",
        host=settings.host,
        port=server.port,
        tls=tls is not None,
        sources=sorted(directories),
    )
    return server


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OperatorError(
            f"{path} cannot be read: {error.strerror}",
            fix="correct log.flight.certificate and log.flight.private_key",
        ) from None


if __name__ == "__main__":
    sys.exit(main())
