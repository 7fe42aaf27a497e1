"""The bytes of one request to Redis and of its answer: a transaction that adds to a stream.

Pure: bytes in, values out, and no Python object per message on the usual way. Invariant:
an answer is taken as complete only when every command's own answer is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import MessageBatch
from cdc.decoding.joins import joined
from sinks.columns import text_bytes

ANSWER_BYTES_MAX = 64 << 20  # far beyond what any permitted request is answered with

_BEGIN = b"*1\r\n$5\r\nMULTI\r\n"
_END = b"*1\r\n$4\r\nEXEC\r\n"
_BEGUN = b"+OK\r\n"
_QUEUED = b"+QUEUED\r\n"
_TOUCHED = b"*-1\r\n"
_ERROR_LINE = b"\r\n-"
_ALREADY_THERE = b"is equal or smaller than the target stream top item"
FEW = 48
"""Up to about so many messages a loop costs less than whole columns."""

_NULL = "$4\r\nnull\r\n"
_COPIED_BYTES = 16 << 10
_SEND_BYTES = 4 << 20  # each such piece has the whole timeout to go out


@dataclass(frozen=True)
class TransactionReply:
    """What a transaction did: of its first ``settled`` messages, ``absorbed`` were there before."""

    settled: int
    absorbed: int
    refusal: str = ""  # why the message after the settled ones was not taken
    torn: bool = False  # whether later ones were taken all the same
    touched: bool = False  # nothing was done: a watched stream was touched by another writer


def encode(
    keys: str | pa.StringArray, batch: MessageBatch, trim: tuple[str, ...] = ()
) -> list[bytes | pa.Buffer]:
    """One transaction that adds all messages, each to its stream, built a column at a time.

    The id of an entry is its cursor, ``<commit_lsn>-<commit_idx>`` in decimal digits. A call of
    Arrow costs as much for one row as for a hundred, so a few messages go one by one.
    ``trim`` are the words of XADD that bound a stream's length.
    """
    if len(batch) <= FEW:
        return [_BEGIN + _few(keys, batch, trim), _END]
    ids = joined(_text(batch.rows, "commit_lsn"), "-", _text(batch.rows, "commit_idx"))
    fields = batch.fields()
    commands = joined(
        f"*{3 + len(trim) + 2 * len(fields)}\r\n$4\r\nXADD\r\n",
        *((f"${len(keys.encode())}\r\n{keys}\r\n",) if isinstance(keys, str) else _bulk(keys)),
        *(f"${len(word)}\r\n{word}\r\n" for word in trim),
        *_bulk(ids),
        *(part for name, values in fields.items() for part in _field(name, values)),
    )
    texts = text_bytes(commands)
    if len(texts) <= _COPIED_BYTES:  # one packet in place of three
        return [_BEGIN + texts.to_pybytes(), _END]
    parts = [texts[at : at + _SEND_BYTES] for at in range(0, len(texts), _SEND_BYTES)]
    return [_BEGIN, *parts, _END]


def _few(keys: str | pa.StringArray, batch: MessageBatch, trim: tuple[str, ...]) -> bytes:
    """The commands of a few messages."""
    fields = batch.fields()
    names = [_bulk_text(name) for name in fields]
    head = f"*{3 + len(trim) + 2 * len(fields)}\r\n" + _bulk_text("XADD")
    bound = "".join(map(_bulk_text, trim))
    streams = [keys] * len(batch) if isinstance(keys, str) else keys.to_pylist()
    cursors = (batch.rows.column(name).to_pylist() for name in ("commit_lsn", "commit_idx"))
    values = (values.to_pylist() for values in fields.values())
    parts: list[str] = []
    for stream, lsn, idx, *texts in zip(streams, *cursors, *values, strict=True):
        parts += (head, _bulk_text(stream), bound, _bulk_text(f"{lsn}-{idx}"))
        for name, text in zip(names, texts, strict=True):
            parts += (name, _NULL if text is None else _bulk_text(text))
    return "".join(parts).encode()


def _bulk_text(text: str) -> str:
    size = len(text) if text.isascii() else len(text.encode())
    return f"${size}\r\n{text}\r\n"


def with_command(request: list[bytes | pa.Buffer], *words: str) -> list[bytes | pa.Buffer]:
    """The same transaction with one more command at its end, which is answered with one line."""
    return [*request[:-1], command(*words) + _END]


def encode_question(
    stream: str, record: str, watched: list[str], fields: tuple[str, ...], above: str | None
) -> bytes:
    """WATCH keys and read a record: two answers; then ask for the stream.

    Without ``above`` XINFO describes it: one answer. With it, EXISTS and its last entry from there
    on: two answers that cost the client a tenth.
    """
    watching = _known_command("WATCH", *watched) + _known_command("HMGET", record, *fields)
    if above is None:
        return watching + command("XINFO", "STREAM", stream)
    entries = command("XREVRANGE", stream, "+", above, "COUNT", "1")
    return watching + _known_command("EXISTS", stream) + entries


def usual_answer(truncation: int, top: str) -> bytes:
    """What the server says to a question with ``above`` if no other writer was there.

    The record has this truncation and this top, and no other field; the stream is there, and
    nothing stands above.
    """
    recorded = _bulk_text(str(truncation)) if truncation else "$-1\r\n"
    return f"+OK\r\n*3\r\n{recorded}{_bulk_text(top)}$-1\r\n:1\r\n*0\r\n".encode()


def is_answer(receive: Callable[[], bytes], usual: bytes) -> bool:
    """Returns True for the usual reply; another one is read only as far as it differs."""
    answer, lines = b"", usual.count(b"\n")
    while answer.count(b"\n") < lines:
        answer += receive()
    return answer == usual


def command(*words: str) -> bytes:
    parts = [word.encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)


@lru_cache(maxsize=256)
def _known_command(*words: str) -> bytes:
    """A command that is sent with every request."""
    return command(*words)


def _field(name: str, values: pa.StringArray) -> tuple[pa.Array | str, ...]:
    named = f"${len(name)}\r\n{name}\r\n"
    if values.null_count == len(values):
        return (named, _NULL)
    return (named, *_bulk(pc.fill_null(values, "null") if values.null_count else values))


def _bulk(column: pa.Array) -> tuple[pa.Array | str, ...]:
    return ("$", pc.binary_length(column).cast(pa.string()), "\r\n", column, "\r\n")


def _text(rows: pa.RecordBatch, name: str) -> pa.StringArray:
    return rows.column(name).cast(pa.string())


def read_outcome(receive: Callable[[], bytes], messages: int, others: int = 0) -> TransactionReply:
    """Read the whole answer to a transaction of that many messages.

    ``others`` are further commands at its end, each of which is answered with one line.

    It is one line for MULTI, one a command for queueing, one for EXEC, and, if EXEC went through,
    two lines (length and id) for each message that was added and one for each that was not. A
    transaction that a touched watch has ended has no more than the line of EXEC.
    """
    answer = bytearray()
    lines = 0
    before_exec = messages + others + 1
    usual_start = _BEGUN + _QUEUED * (messages + others)
    while True:
        part = receive()
        answer += part
        lines += part.count(b"\n")
        if len(answer) > ANSWER_BYTES_MAX:
            raise ConnectionError("the server's answer does not end")
        if lines <= before_exec or not answer.endswith(b"\n"):
            continue
        if not answer.startswith(usual_start) or answer[len(usual_start)] != ord("*"):
            texts = bytes(answer).split(b"\r\n")
            if not texts[before_exec].startswith(b"*"):
                return _discarded(texts[: before_exec + 1])
            raise ConnectionError("the server ran a transaction that it had refused a part of")
        if answer.endswith(_TOUCHED) and len(answer) == len(usual_start) + len(_TOUCHED):
            return TransactionReply(0, 0, touched=True)
        # Every id is digits and a dash between them, so a dash that begins a line is an error.
        errors = answer.count(_ERROR_LINE)
        if lines - before_exec - 1 == 2 * messages - errors + others:
            return _executed(bytes(answer[len(usual_start) :]), messages, errors)


def _discarded(texts: list[bytes]) -> TransactionReply:
    # The first refusal names the cause; the last line only says that the whole was dropped.
    reasons = [text for text in texts if text.startswith(b"-")]
    reason = reasons[0] if reasons else texts[-1]
    return TransactionReply(0, 0, reason[1:].decode(errors="replace"))


def _executed(body: bytes, messages: int, errors: int) -> TransactionReply:
    if body.count(_ALREADY_THERE) == errors:
        return TransactionReply(messages, errors)
    settled = absorbed = 0
    refusal = ""
    for line in body.split(b"\r\n")[1:-1]:
        if line.startswith(b"-") and _ALREADY_THERE not in line:
            refusal = refusal or line[1:].decode(errors="replace")
        elif line.startswith((b"-", b"$")):
            if refusal:
                return TransactionReply(settled, absorbed, refusal, torn=True)
            settled += 1
            absorbed += line.startswith(b"-")
    return TransactionReply(settled, absorbed, refusal)
