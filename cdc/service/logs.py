"""How the service logs: one structured line an event, for people or for machines.

What libraries say through Python's own logging and warnings comes out the same way.
"""

from __future__ import annotations

import logging
import sys

import structlog

from cdc.config import Service

_TEXT_MAX = 400


def configure_logs(settings: Service) -> None:
    """Apply ``service.log_level`` and ``service.log_format`` to this process."""
    renderer: structlog.types.Processor
    if settings.log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[settings.log_level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.captureWarnings(True)
    logging.basicConfig(handlers=[_Relay()], level=logging.WARNING, force=True)


def log_end(process: str, error: Exception) -> None:
    """Say why a process of the service ends."""
    structlog.get_logger("walbrook.service").error(
        "service.ended", process=process, error=str(error).strip()
    )


class _Relay(logging.Handler):
    """A library's log record as one line of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        fields = {"logger": record.name, "text": " ".join(record.getMessage().split())[:_TEXT_MAX]}
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            said = " ".join(str(error).split())[:_TEXT_MAX]
            fields["error"] = f"{type(error).__name__}: {said}"
        level = record.levelname.lower().replace("critical", "error")
        getattr(structlog.get_logger("walbrook.library"), level)("library.log", **fields)
