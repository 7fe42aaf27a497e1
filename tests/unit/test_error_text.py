"""What is shown of errors: enough to act upon, and no value of a row."""

from __future__ import annotations

import ast
import pickle
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
import structlog

from cdc.config import Service
from cdc.decoding import decode_changes
from cdc.error_text import public_line, public_text
from cdc.errors import PoisonError, TransientError, WalbrookError
from cdc.logs import configure_logs
from sinks.http_answers import Answer, meaning
from sinks.redis_errors import from_exception, from_reply
from spark_pipeline.delivery.isolate import as_walbrook_error
from tests import pgoutput
from tests.unit.decoding.frames import OID, Frame

ROOT = Path(__file__).parents[2]
MARKER = "Gwendolen-4711"
_LOGGERS = ("_logger", "logger")


class OddlyNamed(Exception):  # noqa: N818
    """No class of ours, and no word in its name that says what it is."""


ERRORS: list[Exception] = [
    ValueError(f"invalid literal: {MARKER}"),
    KeyError(MARKER),
    OddlyNamed(MARKER),
    psycopg.DataError(f"invalid input syntax for type json: {MARKER}"),
    PoisonError("the endpoint answered 422", detail=MARKER),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_public_text_of_an_error_quotes_no_row(error: Exception) -> None:
    if isinstance(error, psycopg.DataError):
        error.sqlstate = "22P02"
    shown = public_text(error)
    assert MARKER not in shown
    assert type(error).__name__ in shown or isinstance(error, WalbrookError)
    assert MARKER not in str(as_walbrook_error(error))
    assert MARKER in as_walbrook_error(error).full_text


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (psycopg.OperationalError("connection to 127.0.0.1 failed"), "127.0.0.1"),
        (TransientError("the log is full", fix="make room"), "To fix it: make room"),
    ],
)
def test_faults_of_the_machine_and_our_own_are_shown_in_full(error: Exception, shown: str) -> None:
    assert shown in public_text(error)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            f"Lost task 0.0 (executor driver): org.apache.spark.SparkNumberFormatException: "
            f"[CAST_INVALID_INPUT] The value '{MARKER}' of the type",
            "Lost task 0.0 (executor driver): org.apache.spark.SparkNumberFormatException "
            "[CAST_INVALID_INPUT]",
        ),
        ("java.lang.OutOfMemoryError: Java heap space",) * 2,
        (f"ValueError: {MARKER} cdc.errors.TransientError: no", "ValueError"),
        ("cdc.errors.TransientError: the log is full",) * 2,
        ("Task 0 in stage 0.0 failed 1 times; aborting job",) * 2,
    ],
)
def test_a_line_of_spark_is_cut_before_what_may_quote_a_row(line: str, shown: str) -> None:
    assert public_line(line) == shown


def test_a_detail_crosses_the_border_of_a_process_and_no_text_shows_it() -> None:
    error = PoisonError("it was refused", fix="mend it", kind="refused", detail=MARKER)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.detail, copy.kind) == (MARKER, "refused")
    assert copy.full_text == f"it was refused: {MARKER}. To fix it: mend it"
    shown = "".join(traceback.format_exception(copy))
    assert MARKER not in f"{copy} {copy!r} {copy.args} {shown}"


@pytest.mark.parametrize("status", [400, 403, 413, 422, 500, 503])
def test_an_answer_that_repeats_its_request_is_quoted_in_the_detail_alone(status: int) -> None:
    error = meaning(Answer(status, excerpt=MARKER.encode()), "host")
    assert error is not None
    assert MARKER not in str(error)
    assert error.detail == MARKER


@pytest.mark.parametrize(
    "error",
    [
        from_reply(f"-ERR unknown command 'X', with args beginning with: '{MARKER}'"),
        from_reply(f"-{MARKER} is no code"),
        from_exception(redis.DataError(MARKER)),
        from_exception(redis.ResponseError(f"WRONGTYPE {MARKER}")),
    ],
)
def test_an_answer_of_redis_is_quoted_in_the_detail_alone(error: WalbrookError) -> None:
    assert MARKER not in str(error)
    assert MARKER in error.detail


@pytest.fixture
def logs() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize("log_format", ["console", "json"])
def test_an_error_that_is_logged_shows_its_class_and_place_and_no_row(
    capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    configure_logs(Service.model_validate({"log_format": log_format}))
    logger = structlog.get_logger("test")
    try:
        raise ValueError(MARKER) from KeyError(MARKER)
    except ValueError as error:
        logger.warning("test.failed", error=error)
        logger.exception("test.broke")
    shown = capsys.readouterr().err
    assert MARKER not in shown
    assert shown.count("ValueError at tests/unit/test_error_text.py:") == 2


def test_no_log_call_turns_an_error_into_text_where_rows_are_handled() -> None:
    """The log itself shows what may be shown; ``str`` of a foreign error may quote a row."""
    rooms = ["spark_pipeline", "sinks", "cdc/queue", "cdc/state", "cdc/decoding", "cdc/eventtime"]
    files = [file for room in rooms for file in sorted((ROOT / room).rglob("*.py"))]
    found = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file in files
        for call in _log_calls(ast.parse(file.read_text()))
        for given in call.keywords
        if given.arg in ("error", "why", "what") and _is_text_of_error(given.value)
    ]
    assert found == []


def _log_calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        is_log = isinstance(called, ast.Attribute) and getattr(called.value, "id", "") in _LOGGERS
        if isinstance(node, ast.Call) and is_log:
            yield node


def _is_text_of_error(value: ast.expr) -> bool:
    """``str(error)`` and the like, also with something done to the text."""
    return any(
        isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("str", "repr")
        for node in ast.walk(value)
    )


def test_a_value_that_cannot_be_decoded_is_named_by_its_place_alone() -> None:
    item = pgoutput.relation(OID, "public", "item", [("id", 23, True), ("day", 1082)])
    frame = Frame()
    for values in ([MARKER, None], ["1", MARKER]):
        frame.add(pgoutput.insert(OID, values), item)
    errors = decode_changes(frame.batch(), frame.schemas).column("error").to_pylist()
    assert all("of table public.item, column" in error for error in errors)
    assert MARKER not in str(errors)


def test_a_long_line_costs_no_more_than_a_short_one() -> None:
    started = time.process_time()
    assert len(public_line("a." * 100_000)) < 1_000
    assert time.process_time() - started < 2
