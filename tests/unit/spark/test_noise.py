"""What Spark's processes print, as events of the service's log."""

from __future__ import annotations

import io

import pytest
from structlog.testing import capture_logs

from spark_pipeline.jvm.jvm import NoiseStream, Relay
from spark_pipeline.jvm.jvm_output import Event, Noise, said


def events(text: str) -> list[Event]:
    noise = Noise()
    return [event for line in text.splitlines() for event in noise.events(line)]


def logged(level: str, logger: str, message: str, thrown: str = "") -> str:
    """As log4j2.properties writes an event."""
    return "\x02" + "\x1f".join([level, logger, message, thrown])


def test_an_event_of_spark_keeps_its_level_and_logger_and_loses_its_stack() -> None:
    stack = "org.apache.spark.SparkException: lost\\n\\tat a.b(C.scala:1)\\n\\tat d.e(F.scala:2)\\n"
    assert events(logged("ERROR", "Executor", "Exception in task\\nand more", stack)) == [
        Event(
            "error",
            "spark.log",
            {
                "logger": "Executor",
                "text": "Exception in task",
                "error": "org.apache.spark.SparkException",
            },
        )
    ]
    (warned,) = events(logged("WARN", "NativeCodeLoader", "no library"))
    assert (warned.level, warned.fields["text"]) == ("warning", "no library")
    assert [event.level for event in events(logged("TRACE", "X", "y"))] == ["debug"]


@pytest.mark.parametrize(
    ("stack", "says"),
    [
        (
            "An error occurred while calling o1.x.\n: java.io.IOException: Stream closed\n\tat x",
            "java.io.IOException: Stream closed",
        ),
        ("a.B: 1\n\tat x\nCaused by: c.D: 2\nCaused by: e.F: third\n\t... 3 more", "e.F: third"),
        (
            "a.B: Traceback (most recent call last):\n  File x\ncdc.errors.TransientError: gone\n\n"
            "\tat y\nCaused by: z",
            "gone",
        ),
        ("", ""),
    ],
)
def test_of_a_java_stack_the_line_that_says_most_is_kept(stack: str, says: str) -> None:
    assert said(stack) == says


def test_a_worker_that_finds_the_other_end_closed_is_no_news() -> None:
    text = """Traceback (most recent call last):
  File "daemon.py", line 1, in manager
    code = worker(sock)
BrokenPipeError: [Errno 32] Broken pipe

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "daemon.py", line 2, in flush
    flush()
ConnectionResetError: reset
"""
    found = events(text)
    assert {event.level for event in found} == {"debug"}
    raised = [event.fields["error"] for event in found if event.name == "spark.worker_raised"]
    assert raised == ["BrokenPipeError: [Errno 32] Broken pipe", "ConnectionResetError: reset"]


def test_another_traceback_is_one_warning() -> None:
    text = "Traceback (most recent call last):\n  File x, line 1\n    f()\nmod.SomeError: what\n"
    fields = {"error": "mod.SomeError"}
    assert events(text) == [Event("warning", "spark.worker_raised", fields)]


def test_printed_lines_are_for_debugging_unless_they_are_grave() -> None:
    found = events("WARNING: Using incubator modules\n\njava.lang.OutOfMemoryError: heap space\n")
    assert [event.level for event in found] == ["debug", "warning"]


def test_an_event_in_the_middle_of_a_printed_line_is_still_an_event() -> None:
    found = events("half a li" + logged("ERROR", "X", "told"))
    assert [event.name for event in found] == ["spark.printed", "spark.log"]


def test_no_event_is_long_or_has_a_line_break() -> None:
    (event,) = events(logged("ERROR", "X", "word " * 1000))
    assert len(event.fields["text"]) < 500


def test_a_stream_takes_pieces_of_lines_and_a_pipe_its_last_words() -> None:
    with capture_logs() as logs:
        stream = NoiseStream()
        for piece in ("Error: no ", "memory\nan", "other"):
            stream.write(piece)
        relay = Relay(io.StringIO("Error: bad option\n\tat a.b\n"))
        relay.join(10)
    assert [entry["text"] for entry in logs][:2] == ["Error: no memory", "Error: bad option"]
    assert relay.last_words() == "Error: bad option"
