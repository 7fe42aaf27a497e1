"""What the API answers when it does not do what was asked: ``{"error": {field, what, fix}}``."""

from __future__ import annotations

import psycopg
from starlette.responses import JSONResponse, Response

UNKNOWN_CONSUMER, NOT_PULLED, PAUSED, AMBIGUOUS = "WB001", "WB002", "WB003", "WB004"
BAD_ARGUMENT = "22023"
"""SQLSTATEs of the functions in ``walbrook``."""

_STATUS = {UNKNOWN_CONSUMER: 404, NOT_PULLED: 409, PAUSED: 409, AMBIGUOUS: 409, BAD_ARGUMENT: 400}


class RefusedError(Exception):
    """A request that is not served: the status, what is wrong, and what would be right."""

    def __init__(
        self,
        status: int,
        what: str,
        *,
        fix: str = "",
        field: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(what)
        self.status = status
        self.what = what
        self.fix = fix
        self.field = field
        self.headers = headers

    def response(self) -> Response:
        error = {"field": self.field, "what": self.what, "fix": self.fix}
        return JSONResponse({"error": error}, self.status, headers=self.headers)


def refused_by_sql(error: psycopg.Error) -> RefusedError:
    """What a function of ``walbrook`` raised, or that the state database does not answer."""
    diagnosis = error.diag
    status = _STATUS.get(error.sqlstate or "")
    if status is not None:
        return RefusedError(
            status,
            diagnosis.message_primary or "refused",
            fix=diagnosis.message_hint or "",
            field=diagnosis.column_name,
        )
    return RefusedError(
        503,
        "the state database does not answer",
        fix="try again; if it stays, /health says more",
        headers={"Retry-After": "1"},
    )
