"""The same acts over HTTP and from the command line: what SQL says is what one gets."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from cdc.errors import WalbrookError
from cdc.queue.health import report_queues
from cdc.service.cli.entry import app
from tests.api_server import client as client
from tests.api_server import config as config
from tests.api_server import operator as operator
from tests.operators import Operator

pytestmark = pytest.mark.migrated

_SKIPPED = """
SELECT from_lsn || ':' || from_idx, to_lsn || ':' || to_idx FROM walbrook.gaps
 WHERE consumer = 'hook' AND reason = 'skipped'
"""


def test_each_act_over_http_answers_with_the_new_state(
    client: httpx.Client, operator: Operator
) -> None:
    assert client.post("/hook/pause").json()["paused_at"] is not None
    assert client.post("/hook/resume", json={}).json()["paused_at"] is None
    operator.waits("0/400", group=1, due="2026-01-01")
    rewound = client.post("/hook/rewind", json={"to_cursor": "0/300:2"})
    assert rewound.status_code == 200
    assert {k: rewound.json()[k] for k in ("source", "consumer", "cursor", "affected")} == {
        "source": "shop", "consumer": "hook", "cursor": "0/300:2", "affected": 1,
    }  # fmt: skip
    assert client.post("/hook/rewind", json={"to_time": "2026-01-01T10:00:00Z"}).json()[
        "cursor"
    ] == "0/100:0"  # fmt: skip
    operator.waits("0/200")
    operator.waits("0/210")
    number = operator.dies("0/200")
    listed = client.get("/hook/dead_letters", params={"limit": 5}).json()["data"]
    assert [(d["id"], d["cursor"], d["error"]) for d in listed] == [
        (number, "0/200:0", "it was refused")
    ]
    assert client.post("/hook/redeliver", json={"id": number}).json()["waiting"] == 2
    assert client.post("/hook/discard", json={"cursor": "0/210:0"}).json()["affected"] == 1
    operator.dies("0/200")
    assert client.post("/hook/discard").json()["affected"] == 1
    assert client.post("/hook/redeliver").json()["affected"] == 0
    skipped = client.post("/hook/skip_to", json={"cursor": "0/600:1"})
    assert (skipped.status_code, skipped.json()["cursor"]) == (200, "0/600:1")
    assert operator.rows(_SKIPPED) == [("0/100:0", "0/600:1")]
    assert client.post("/hook/discard_all").json()["cursor"] == "0/900:3"


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/nobody/pause", b"", 404, "there is no consumer nobody"),
        ("/hook/discard", b'{"id": 77}', 404, "there is no dead letter 77 of hook"),
        ("/hook/discard", b'{"cursor": "0/1:1"}', 404, "no message of hook waits at 0/1:1"),
        ("/hook/discard", b'{"cursor": "0/1:1", "id": 7}', 400, "both were given"),
        ("/hook/discard", b'{"ids": 7}', 400, "ids is not known here; known: id, cursor"),
        ("/hook/redeliver", b'{"id": "7"}', 400, "id is not of type int"),
        ("/hook/redeliver", b'{"id": true}', 400, "id is not of type int"),
        ("/hook/redeliver", b'{"id": 9223372036854775808}', 400, "out of range"),
        ("/hook/rewind", b'{"to_cursor": "0/1"}', 400, "'0/1' is not a cursor"),
        ("/hook/rewind", b'{"to_time": "noon?"}', 400, "noon?"),
        ("/hook/rewind", b"{}", 400, "it is not clear where hook is to go"),
        ("/hook/rewind", b"[1]", 400, "the body is not a JSON object"),
        ("/hook/rewind", b"{", 400, "the body is not JSON"),
        ("/hook/rewind", b" " * (5 << 20), 413, "larger than"),
        ("/hook/rewind", b'{"to_cursor": "0/900:9"}', 409, "beyond the end of the change log"),
        ("/hook/skip_to", b"{}", 400, "cursor is missing"),
        ("/hook/skip_to", b'{"to_cursor": "0/600:1"}', 400, "to_cursor is not known here"),
        ("/hook/skip_to", b'{"cursor": "0/1"}', 400, "'0/1' is not a cursor"),
        ("/hook/skip_to", b'{"cursor": "0/500:0"}', 409, "not before 0/500:0"),
        ("/hook/skip_to", b'{"cursor": "0/900:9"}', 409, "beyond the end of the change log"),
        ("/files/rewind", b'{"to_earliest": true}', 409, "keeps a position of its own"),
    ],
)
def test_a_refusal_over_http_says_what_and_how_to_mend_it(
    client: httpx.Client, path: str, body: bytes, status: int, says: str
) -> None:
    answer = client.post(path, content=body)
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["what"]
    assert set(answer.json()["error"]) == {"field", "what", "fix"}


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x"])
def test_a_listing_has_a_bound(client: httpx.Client, limit: str) -> None:
    answer = client.get("/hook/dead_letters", params={"limit": limit})
    assert answer.status_code == 400
    assert client.get("/nobody/dead_letters").status_code == 404


def test_each_act_on_the_command_line_prints_the_new_state(
    operator: Operator, config: Path
) -> None:
    def walbrook(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, "-c", str(config)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    assert "hook stands at 0/500:0, paused since 20" in walbrook("pause", "hook")
    assert walbrook("resume", "hook") == (
        "hook stands at 0/500:0; 0 in its queue, 0 dead letters\n"
    )
    rewound = walbrook("rewind", "hook", "--to-cursor", "0/300:2")
    assert rewound.startswith("hook stands at 0/300:2;"), "nothing was in its queue"
    assert "hook stands at 0/100:0;" in walbrook("rewind", "hook", "--to-earliest")
    assert walbrook("dead-letters") == "no dead letters\n"
    operator.waits("0/200", group=1)
    operator.waits("0/210", group=1)
    number = operator.dies("0/200")
    listed = walbrook("dead-letters", "hook").splitlines()
    assert listed[1].split() == [
        str(number), "hook", "0/200:0", "public.item", "insert", "delivery", "3",
    ]  # fmt: skip
    assert listed[2] == "    it was refused"
    assert "1 message put back into its queue" in walbrook("redeliver", "hook", "--id", str(number))
    assert "1 message discarded" in walbrook("discard", "hook", "--cursor", "0/200:0")
    operator.dies("0/210")
    assert "1 message discarded" in walbrook("discard", "hook")
    operator.letter("0/220", 0, "decode")
    operator.waits("0/230", group=1)
    operator.dies("0/230")
    assert "1 dead letters of hook never were messages and stay" in walbrook("redeliver", "hook")
    assert "hook stands at 0/600:1;" in walbrook("skip-to", "hook", "0/600:1", "--yes")
    assert operator.rows(_SKIPPED) == [("0/100:0", "0/600:1")]
    assert "hook stands at 0/900:3;" in walbrook("discard-all", "hook", "--yes")


def test_a_refusal_on_the_command_line_is_the_sentence_of_the_function(
    operator: Operator, config: Path
) -> None:
    for arguments, says in {
        ("pause", "nobody"): "there is no consumer nobody. To fix it: there are: files, hook",
        ("rewind", "hook"): "it is not clear where hook is to go. To fix it: give one of",
        ("skip-to", "hook", "0/900:9", "--yes"): "beyond the end of the change log",
        ("rewind", "files", "--to-earliest"): "keeps a position of its own",
        ("dead-letters", "nobody"): "there is no consumer nobody",
        ("discard", "hook", "--id", "77"): "there is no dead letter 77 of hook",
    }.items():
        result = CliRunner().invoke(app, [*arguments, "-c", str(config)])
        assert isinstance(result.exception, WalbrookError)
        assert says in str(result.exception)


_DEPOT = """
INSERT INTO walbrook.sources (name, slot, publication, system_identifier, restart_lsn, log_lsn,
                              log_idx)
VALUES ('depot', 's', 'p', '1', '0/64', '0/900', 3);
INSERT INTO walbrook.consumers (source, name, cursor_lsn, destination)
VALUES ('depot', 'hook', '0/500', 'webhook');
SELECT walbrook.make_queue(id) FROM walbrook.consumers WHERE source = 'depot';
"""


@pytest.mark.parametrize("name", ["depot%2Fhook", "depot%2fhook", "depot/hook"])
def test_over_http_one_of_several_databases_is_named_with_its_database(
    client: httpx.Client, operator: Operator, name: str
) -> None:
    operator.connection.execute(_DEPOT)
    answer = client.post("/hook/pause")
    assert answer.status_code == 409
    assert answer.json()["error"]["fix"] == "name one of them as depot/hook"
    paused = client.post(f"/{name}/pause").json()
    assert (paused["source"], paused["paused_at"] is None) == ("depot", False)
    rewound = client.post(f"/{name}/rewind", json={"to_cursor": "0/300:2"}).json()
    assert (rewound["source"], rewound["cursor"]) == ("depot", "0/300:2")
    ours, theirs = operator.letter("0/200", 4, "event_time"), operator.letter("0/210", 0, "late")
    operator.connection.execute("UPDATE walbrook.dead_letters SET source = 'depot'")
    listed = client.get(f"/{name}/dead_letters").json()["data"]
    assert [(each["id"], each["called"]) for each in listed] == [
        (ours, "depot/hook"), (theirs, "depot/hook"),
    ]  # fmt: skip
    refused = client.post(f"/{name}/redeliver", json={"id": ours})
    assert refused.status_code == 409, "and not 404, nor that it is ambiguous"
    assert "never was a message" in refused.json()["error"]["what"]
    assert "walbrook.rewind('depot/hook', '0/200:4')" in refused.json()["error"]["fix"]
    assert client.post(f"/{name}/discard", json={"id": ours}).json()["source"] == "depot"
    assert client.post("/shop%2Fhook/discard", json={"id": theirs}).status_code == 404
    assert client.post(f"/{name}/discard").json()["affected"] == 1
    assert client.post("/depot%2Fnobody/pause").status_code == 404
    assert client.post("/depot/hook/nothing/pause").status_code == 404


def test_on_the_command_line_one_of_several_databases_is_named_with_its_database(
    operator: Operator, config: Path
) -> None:
    def walbrook(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, "-c", str(config)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    operator.waits("0/200")
    number = operator.dies("0/200")
    operator.connection.execute(_DEPOT)
    refused = CliRunner().invoke(app, ["pause", "hook", "-c", str(config)]).exception
    assert "name one of them as depot/hook" in str(refused)
    assert "depot/hook stands at 0/500:0, paused since 20" in walbrook("pause", "depot/hook")
    assert "depot/hook stands at 0/500:0;" in walbrook("resume", "depot/hook")
    assert walbrook("dead-letters", "depot/hook") == "no dead letters\n"
    assert walbrook("dead-letters", "shop/hook").splitlines()[1].split()[1] == "shop/hook"
    assert "1 message put back" in walbrook("redeliver", "shop/hook", "--id", str(number))
    assert "shop/hook stands at 0/900:3;" in walbrook("discard-all", "shop/hook", "--yes")
    operator.connection.execute("UPDATE walbrook.consumers SET active = false")
    refused = CliRunner().invoke(app, ["pause", "depot/hook", "-c", str(config)]).exception
    assert "consumer depot/hook is not active" in str(refused)


def test_a_database_that_was_never_migrated_is_named_as_that(
    operator: Operator, config: Path
) -> None:
    operator.connection.execute("DROP SCHEMA walbrook CASCADE")
    result = CliRunner().invoke(app, ["pause", "hook", "-c", str(config)])
    assert "run walbrook migrate" in str(result.exception)


def test_health_says_of_refused_messages_whether_they_may_pass(operator: Operator) -> None:
    ((term,),) = operator.rows("SELECT term FROM walbrook.sources WHERE name = 'shop'")
    said = "SELECT what FROM walbrook.health WHERE kind = 'queue_waiting'"
    operator.waits("0/200", group=1)
    for kind, why in {"poison": "its content", "transient": "a reason that may pass"}.items():
        operator.rows(f"UPDATE walbrook.events SET error_kind = '{kind}' RETURNING 1")
        report_queues(operator.connection, "shop", term)
        ((what,),) = operator.rows(said)
        assert "refused 1 message, and 0 wait behind it" in what
        assert what.endswith(f"The first: 0/200:0 of table public.item, refused for {why}")
