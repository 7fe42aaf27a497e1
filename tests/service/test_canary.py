"""Secrets and values of rows are found nowhere but where they belong.

A service is given canaries: a password in a DSN, a header of a webhook, tokens, values of rows,
also in an endpoint's refusal. Then whatever it says is searched for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict

from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.waiting import until
from tests.walbrook_service import Service, started

DSN, HEADER, TOKEN, ROW, QUERY = (
    f"canary-{what}-4711-c0ffee" for what in ("dsn", "header", "token", "row", "query")
)
CANARY = re.compile(r"canary-(dsn|header|token|row|query)-4711")

_SAYS = """
SELECT json_build_object(
    'health', (SELECT json_agg(h) FROM walbrook.health_events h),
    'audit', (SELECT json_agg(a) FROM walbrook.audit a),
    'sources', (SELECT json_agg(s) FROM walbrook.sources s),
    'consumers', (SELECT json_agg(c) FROM walbrook.consumers c),
    'feeds', (SELECT json_agg(f) FROM walbrook.feeds f),
    'queues', (SELECT json_agg(q) FROM walbrook.queues q),
    'gaps', (SELECT json_agg(g) FROM walbrook.gaps g),
    'cursors', (SELECT json_agg(v) FROM walbrook.cursors v),
    'activity', (SELECT json_agg(p.application_name) FROM pg_stat_activity p))::text
"""
_COMMANDS = (
    ("status",),
    ("status", "--json"),
    ("sources",),
    ("sinks", "--json"),
    ("lag",),
    ("queue", "--json"),
    ("audit", "--json"),
    ("config", "show"),
    ("config", "check", "--connect"),
    ("doctor",),
    ("log", "ls"),
    ("backfill", "status"),
    ("pause", "nobody"),
    ("rewind", "hook", "--to-cursor", "0/1:0"),
    ("pause", "hook"),
    ("resume", "hook"),
)


def refusing(messages: list[dict[str, object]]) -> Scripted:
    """An endpoint that quotes the request in its answer."""
    return Scripted(422, body=f'{{"refused": "{ROW}", "because": {len(messages)}}}'.encode())


@contextmanager
def role(database: Database) -> Iterator[str]:
    """A superuser whose password is a canary."""
    name = f"canary_{database.name}"[:60]
    database.execute(f"CREATE ROLE \"{name}\" SUPERUSER LOGIN PASSWORD '{DSN}'")
    try:
        yield name
    finally:
        database.execute(f'REASSIGN OWNED BY "{name}" TO CURRENT_USER')
        database.execute(f'DROP OWNED BY "{name}"')
        database.execute(f'DROP ROLE "{name}"')


def service_of(database: Database, directory: Path, endpoint: Endpoint, user: str) -> Service:
    sinks: list[dict[str, object]] = [
        {
            "name": "hook",
            "max_deliveries": 2,
            "retry": {"first_ms": 50, "max_ms": 100},
            "destination": {
                "type": "webhook",
                "url": endpoint.url,
                "headers": {"Authorization": f"Bearer {HEADER}"},
                "max_retries": 0,
            },
        },
        {
            "name": "away",
            "destination": {
                "type": "redis_stream",
                "url": f"redis://canary:{DSN}@127.0.0.1:1/0",
            },
        },
    ]
    tokens = [
        {"name": "ops", "token": TOKEN},
        {"name": "grafana", "token": f"{TOKEN}-read", "role": "read"},
    ]
    service = Service(database, directory, sinks, {"service": {"http": {"port": 0}}})
    read = yaml.safe_load(service.config.read_text())
    place = conninfo_to_dict(database.dsn)
    read["databases"][0]["url"] = (
        f"postgres://{user}:{DSN}@{place['host']}:{place['port']}/{place['dbname']}"
    )
    http = {"port": 0, "tokens": tokens}
    read["service"] = {"http": http, "log_level": "debug", "drain_timeout_s": 1}
    service.config.write_text(yaml.safe_dump(read, sort_keys=False))
    return service


@pytest.mark.timeout(400)
def test_a_canary_is_in_no_log_error_metric_health_event_or_audit_row(
    database: Database, tmp_path: Path, endpoint: Endpoint
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, note text)")
    endpoint.faults = refusing
    with role(database) as user:
        service = service_of(database, tmp_path, endpoint, user)
        with started(service):
            database.execute(
                f"INSERT INTO item SELECT n, '{ROW}' FROM generate_series(1, 3) AS g (n)"
            )
            service.until("dead letters", "SELECT count(*) >= 3 FROM walbrook.dead_letters")
            assert ROW in str(database.execute("SELECT error, event FROM walbrook.dead_letters"))
            service.until(
                "the sink that is away to fail",
                "SELECT last_error IS NOT NULL FROM walbrook.consumers WHERE name = 'away'",
            )
            said = _over_http(service)
            service.until(
                "the backfill to fail",
                "SELECT coalesce(error, reason) IS NOT NULL FROM walbrook.backfills",
            )
            said |= {f"walbrook {' '.join(each)}": _output(service, each) for each in _COMMANDS}
            said["SQL"] = str(database.execute(_SAYS)[0][0])
            assert "service.ready" in service.log.read_text(errors="replace")
        service.stop()
        said["the log"] = service.log.read_text(errors="replace")
    assert len(said["walbrook config show"]) > 500, "the commands did say something"
    assert "start_backfill" in said["SQL"]
    leaks = {what: CANARY.findall(text) for what, text in said.items() if CANARY.search(text)}
    assert leaks == {}


def _output(service: Service, arguments: tuple[str, ...]) -> str:
    done = service.run(*arguments)
    return done.stdout + done.stderr


def _over_http(service: Service) -> dict[str, str]:
    """Answers of every kind: well, refused, malformed, without a token that is known."""
    said: dict[str, str] = {}
    with httpx.Client(base_url=f"http://127.0.0.1:{service.http_port()}", timeout=30) as client:

        def ask(method: str, path: str, token: str = TOKEN, **more: object) -> httpx.Response:
            headers = {"Authorization": f"Bearer {token}"}
            answer = client.request(method, path, headers=headers, **more)  # type: ignore[arg-type]
            said[f"{method} {path} {len(said)}"] = str(answer.headers) + answer.text
            return answer

        until("the service to serve", lambda: ask("GET", "/metrics").status_code == 200)
        _each(ask, "/health", "/metrics", "/api/sources", "/api/consumers", "/api/lag",
              "/api/queue", "/api/audit", "/api/openapi.json", "/api/nothing")  # fmt: skip
        begun = ask(
            "POST",
            "/api/consumers/hook/backfills",
            json={"table": "public.item", "where": f"note::int = 1 OR note = '{QUERY}'"},
        )
        assert begun.status_code == 200, begun.text
        assert QUERY in begun.json()["where_sql"], "the answer has what was asked for"
        said.popitem()
        assert ask("POST", "/api/consumers/hook/pause", f"{TOKEN}-read").status_code == 403
        assert ask("GET", "/api/audit", f"{TOKEN}x").status_code == 401
        assert ask("POST", "/api/consumers/hook/rewind", json={}).status_code == 400
    return said


def _each(ask: Callable[[str, str], httpx.Response], *paths: str) -> None:
    for path in paths:
        ask("GET", path)
