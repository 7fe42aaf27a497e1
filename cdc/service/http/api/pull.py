"""``/api/consumers/{name}/receive``, ``ack``, ``nack`` and ``extend``, and Sequin's paths for them.

What a message says is put into the answer as the text it was stored as, so that no number changes
on the way. Invariant: who hung up before the answer was ready keeps nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cdc.service.http.api import arguments
from cdc.service.http.api.claims import Claimed, Claims
from cdc.service.http.api.refusals import RefusedError
from cdc.service.http.api.routes import About, Member, guarded, json_body
from cdc.service.http.api.state import StateConnections
from cdc.service.http.api.tokens import Access

_ACK = "SELECT done, refused, reasons FROM walbrook.ack(%s, %s)"
_NACK = "SELECT done, refused, reasons FROM walbrook.nack(%s, %s, %s::interval, %s)"
_EXTEND = "SELECT done, refused, reasons FROM walbrook.extend(%s, %s, %s::interval)"

_SEQUIN = "/api/sequin_streams/{name}"
_OURS = "/api/consumers/{name}"

_ACK_IDS = {"ack_ids": Member("array", "Those that the messages came with.", required=True)}
_SIZES = {
    "batch_size": Member("integer", "At most so many messages; 1 if not given."),
    "max_batch_size": Member("integer", "The same."),
    "wait_for": Member("string", "Milliseconds, or text such as 60s."),
}
_ABOUT = {
    "receive": About(
        "Receive messages, and hold them for a while.",
        {
            "batch_size": Member("integer", "At most so many messages; 1 if not given."),
            "wait_s": Member("number", "How long to wait for a first one."),
            "visibility_s": Member("number", "How long they are held."),
            "holder": Member("string", "A name that walbrook.leases shows."),
        },
        answer="The messages.",
    ),
    "ack": About("Messages are done.", _ACK_IDS, answer="How many."),
    "nack": About(
        "Give messages back.",
        {
            **_ACK_IDS,
            "delay_s": Member("number", "They come again after so long."),
            "error": Member("string", "Why."),
        },
        answer="How many.",
    ),
    "extend": About(
        "Hold messages for longer.",
        {**_ACK_IDS, "by_s": Member("number", "For so long.", required=True)},
        answer="How many.",
    ),
}
_AS_SEQUIN = About("Receive messages as Sequin's clients do.", _SIZES, _SIZES, "The messages.")


class PullApi:
    """What claimers ask for over HTTP; made inside the server's event loop."""

    def __init__(self, state_dsn: str) -> None:
        self._connections = StateConnections(state_dsn)
        self.claims = Claims(state_dsn, self._connections)

    async def close(self) -> None:
        await self.claims.close()
        await self._connections.close()

    async def receive(self, request: Request) -> Response:
        given = await json_body(request)
        arguments.refuse_unknown(given, ("batch_size", "wait_s", "visibility_s", "holder"))
        messages = await self._received(
            request,
            batch_size=_batch_size(given, "batch_size"),
            wait_s=arguments.seconds(given, "wait_s", least=0, most=arguments.WAIT_S_MAX) or 0,
            visibility_s=arguments.seconds(
                given, "visibility_s", least=1, most=arguments.HOLD_S_MAX
            ),
            holder=arguments.text(given, "holder"),
        )
        return _json(b'{"messages":[' + b",".join(map(_ours, messages)) + b"]}")

    async def receive_as_sequin(self, request: Request) -> Response:
        given = {**request.query_params, **await json_body(request)}
        arguments.refuse_unknown(given, ("batch_size", "max_batch_size", "wait_for"))
        size = "max_batch_size" if "max_batch_size" in given else "batch_size"
        most = arguments.WAIT_S_MAX
        messages = await self._received(
            request,
            batch_size=_batch_size(given, size),
            wait_s=arguments.seconds(given, "wait_for", least=0, most=most, unit="ms") or 0,
        )
        return _json(b'{"data":[' + b",".join(map(_sequins, messages)) + b"]}")

    async def ack(self, request: Request) -> Response:
        given = await json_body(request)
        arguments.refuse_unknown(given, ("ack_ids",))
        return await self._said(request, "acked", _ACK, arguments.ack_ids(given))

    async def nack(self, request: Request) -> Response:
        given = await json_body(request)
        arguments.refuse_unknown(given, ("ack_ids", "delay_s", "error"))
        delay_s = arguments.seconds(given, "delay_s", least=0, most=arguments.HOLD_S_MAX)
        delay = None if delay_s is None else f"{delay_s} seconds"
        error = arguments.text(given, "error")
        return await self._said(request, "nacked", _NACK, arguments.ack_ids(given), delay, error)

    async def extend(self, request: Request) -> Response:
        given = await json_body(request)
        arguments.refuse_unknown(given, ("ack_ids", "by_s"))
        by_s = arguments.seconds(given, "by_s", least=1, most=arguments.HOLD_S_MAX)
        if by_s is None:
            raise RefusedError(400, "by_s is required", fix="say by how many seconds", field="by_s")
        by = f"{by_s} seconds"
        return await self._said(request, "extended", _EXTEND, arguments.ack_ids(given), by)

    async def _received(
        self,
        request: Request,
        *,
        batch_size: int,
        wait_s: float,
        visibility_s: float | None = None,
        holder: str | None = None,
    ) -> list[Claimed]:
        """What the claim gives, unless the client has hung up."""
        name = str(request.path_params["name"])
        claim = asyncio.ensure_future(
            self.claims.receive(
                name,
                batch_size=batch_size,
                wait_s=wait_s,
                visibility_s=visibility_s,
                holder=holder,
            )
        )
        gone = asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait({claim, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                return await claim
            if claim.done() and claim.exception() is None:
                await self.claims.give_back(name, claim.result())
            raise RefusedError(499, "whoever asked has hung up")
        finally:
            claim.cancel()
            gone.cancel()

    async def _said(
        self, request: Request, done: str, query: str, ack_ids: list[str], *more: object
    ) -> Response:
        name = str(request.path_params["name"])
        ((count, refused, reasons),) = await self._connections.fetch(query, (name, ack_ids, *more))
        as_sequin = request.url.path.startswith("/api/sequin_streams/")
        if not refused:
            return _json(orjson.dumps({"success": True} if as_sequin else {done: count}))
        assert isinstance(refused, list)
        assert isinstance(reasons, list)
        pairs = zip(refused, reasons, strict=True)
        listed = [{"ack_id": ack_id, "reason": reason} for ack_id, reason in pairs]
        if as_sequin:  # whose clients take anything else for a request to send again
            return _json(orjson.dumps({"success": True, "refused": listed}))
        error = {
            "field": "ack_ids",
            "what": f"{len(refused)} of {len(ack_ids)} were refused; the first: {reasons[0]}",
            "fix": "receive again; whoever holds a message now will acknowledge it",
        }
        return _json(orjson.dumps({"error": error, done: count, "refused": listed}), 409)


def pull_routes(api: Callable[[], PullApi], access: Access) -> list[Route]:
    """The routes; ``api`` gives the one that the server's event loop has."""

    def route(path: str, act: str, about: About, methods: Sequence[str] = ("POST",)) -> Route:
        async def handler(request: Request) -> Response:
            answer: Response = await getattr(api(), act)(request)
            return answer

        return guarded(path, handler, access, methods=methods, about=about)

    return [
        *(route(f"{_OURS}/{act}", act, about) for act, about in _ABOUT.items()),
        route(f"{_SEQUIN}/receive", "receive_as_sequin", _AS_SEQUIN, ("GET", "POST")),
        *(route(f"{_SEQUIN}/{act}", act, _ABOUT[act]) for act in ("ack", "nack")),
    ]


def _batch_size(given: arguments.Members, name: str) -> int:
    return arguments.whole_number(given, name, default=1, most=arguments.BATCH_MAX)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _ours(message: Claimed) -> bytes:
    members = {
        "ack_id": message.ack_id,
        "deliveries": message.deliveries,
        "lease_until": message.lease_until,
        "cursor": message.cursor,
        "table_schema": message.table_schema,
        "table_name": message.table_name,
        "action": message.action,
    }
    return orjson.dumps(members)[:-1] + b',"message":' + message.text.encode() + b"}"


def _sequins(message: Claimed) -> bytes:
    ack_id = orjson.dumps(message.ack_id)
    return b'{"ack_id":' + ack_id + b',"data":' + message.text.encode() + b"}"


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")
