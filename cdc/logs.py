"""How the service logs: one structured line an event, for people or for machines.

What libraries say through Python's own logging and warnings comes out the same way. An error is
logged as it is (``error=error``, or ``exception``): what of it may be shown is decided here.
"""

from __future__ import annotations

import logging
import sys

import structlog

from cdc.config import Service
from cdc.error_text import public_line, public_text, stack_of


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
            show_errors,
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
    structlog.get_logger("walbrook.service").error("service.ended", process=process, error=error)


def show_errors(
    _logger: object, _method: str, event: structlog.types.EventDict
) -> structlog.types.EventDict:
    """Errors among the fields as texts that quote no row; of a traceback, where it was raised."""
    exc_info = event.pop("exc_info", None)
    raised = sys.exc_info()[1] if exc_info is True else exc_info
    if isinstance(raised, tuple):
        raised = raised[1]
    if isinstance(raised, BaseException):
        event.setdefault("error", raised)
        event["stack"] = stack_of(raised)
    for name, value in event.items():
        if isinstance(value, BaseException):
            event[name] = public_text(value)
    return event


class _Relay(logging.Handler):
    """A library's log record as one line of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        fields = {"logger": record.name, "text": public_line(record.getMessage())}
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = public_text(record.exc_info[1])
        level = record.levelname.lower().replace("critical", "error")
        getattr(structlog.get_logger("walbrook.library"), level)("library.log", **fields)
