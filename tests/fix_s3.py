"""A server that speaks S3 for the tests, started once per test process when one asks for it.

It checks signatures and permissions. Invariant: requests go to the loopback interface alone; the
client looks for credentials nowhere but in the environment.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest

from demo.loopback import LOOPBACK, free_port
from tests.certificates import Authority
from tests.waiting import until

_REGION = "eu-central-1"
_ANY = {"region_name": _REGION, "aws_access_key_id": "any", "aws_secret_access_key": "any"}
_ALLOW_ALL = {"Effect": "Allow", "Action": ["s3:*", "glue:*"], "Resource": "*"}


@dataclass(frozen=True)
class Account:
    """What a client signs its requests with."""

    key: str
    secret: str


@dataclass(frozen=True)
class S3:
    """The server and a bucket that no other test uses."""

    endpoint: str  # of the clear listener
    tls_endpoint: str
    authority: Path
    account: Account
    stranger: Account  # known to the server, and without any permission
    bucket: str

    @property
    def options(self) -> str:
        """Those of a URL, for requests in the clear."""
        return f"scheme=http&region={_REGION}&endpoint_override={self.endpoint}"

    @property
    def tls_options(self) -> str:
        return f"region={_REGION}&endpoint_override={self.tls_endpoint}"

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/claims?{self.options}"

    def objects(self) -> list[str]:
        """The keys of what is in the bucket."""
        listed = self._client().list_objects_v2(Bucket=self.bucket)
        return [each["Key"] for each in listed.get("Contents", ())]

    def read(self, location: str) -> bytes:
        """The content at ``s3://bucket/key``, as a reader without our code gets it."""
        bucket, _, key = location.removeprefix("s3://").partition("/")
        content: bytes = self._client().get_object(Bucket=bucket, Key=key)["Body"].read()
        return content

    def write(self, key: str, content: bytes) -> None:
        self._client().put_object(Bucket=self.bucket, Key=key, Body=content)

    def _client(self) -> Any:
        return _client("s3", f"http://{self.endpoint}", self.account)


def _client(service: str, endpoint: str, account: Account | None = None, **more: object) -> Any:
    login = (
        {"aws_access_key_id": account.key, "aws_secret_access_key": account.secret}
        if account is not None
        else {}
    )
    return boto3.client(service, endpoint_url=endpoint, **{**_ANY, **login, **more})


@contextmanager
def _listening(log: Path, *arguments: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(port), *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        with suppress(OSError), socket.create_connection((LOOPBACK, port), 1):
            return True
        return False

    try:
        until("the S3 server", answers, 60)
        yield f"{LOOPBACK}:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _account(endpoint: str, name: str, *statements: object) -> Account:
    iam = _client("iam", f"http://{endpoint}")
    iam.create_user(UserName=name)
    if statements:
        policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
        iam.put_user_policy(UserName=name, PolicyName=name, PolicyDocument=policy)
    made = iam.create_access_key(UserName=name)["AccessKey"]
    return Account(made["AccessKeyId"], made["SecretAccessKey"])


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    """A listener in the clear that checks who asks, and one with TLS that does not."""
    with ExitStack() as held:
        name = held.enter_context(tempfile.TemporaryDirectory(prefix="walbrook-test-s3-"))
        directory = Path(name)
        authority = Authority(directory / "authority")
        chain, key = authority.sign("DNS:localhost,IP:127.0.0.1")
        clear = held.enter_context(_listening(directory / "clear.log"))
        tls = held.enter_context(
            _listening(directory / "tls.log", "-s", "-c", str(chain), "-k", str(key))
        )
        account = _account(clear, "walbrook", _ALLOW_ALL)
        stranger = _account(clear, "stranger")
        # From here on the server checks signatures and permissions.
        httpx.post(f"http://{clear}/moto-api/reset-auth", content=b"0").raise_for_status()
        yield S3(clear, tls, authority.certificate, account, stranger, "")


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3:
    """The server with a new bucket; the environment has the account that may use it."""
    server = s3_server
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.account.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.account.secret)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for variable in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(variable, str(tmp_path / "none"))
    bucket = f"t{uuid.uuid4().hex}"
    where = {"LocationConstraint": _REGION}
    clear = _client("s3", f"http://{server.endpoint}", server.account)
    tls = _client("s3", f"https://{server.tls_endpoint}", verify=str(server.authority))
    for client in (clear, tls):
        client.create_bucket(Bucket=bucket, CreateBucketConfiguration=where)
    return S3(
        server.endpoint, server.tls_endpoint, server.authority, server.account, server.stranger,
        bucket,
    )  # fmt: skip
