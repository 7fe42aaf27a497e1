"""A Kafka broker of our own: one KRaft node on the loopback interface.

It listens in the clear, behind a proxy's address, with TLS that asks for the client's certificate,
and with SASL over TLS. Invariant: its ports and its data stay the same when it is restarted.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from cdc.service.process.java import find_java
from demo.loopback import LOOPBACK, free_port
from tests.certificates import Authority
from tests.kafka_jars import kafka_jars

USER, PASSWORD = "alice", "alice-secret"
MESSAGE_BYTES_MAX: Final = 8 << 20
_CLUSTER: Final = "d2FsYnJvb2tfa2Fma2FfdA"
_START_TIMEOUT_S, _STOP_TIMEOUT_S = 90.0, 30.0
_POLL_S = 0.1
_LOGIN: Final = "org.apache.kafka.common.security"


@dataclass(frozen=True)
class Ports:
    """Where it listens."""

    clear: int
    proxied: int
    tls: int
    sasl: int
    controller: int


class KafkaBroker:
    """One broker in one directory; a context manager that starts and stops it.

    ``proxy_port`` is what clients of the listener at ``ports.proxied`` are told.
    """

    def __init__(self, directory: Path, *, proxy_port: int | None = None) -> None:
        self.directory = directory
        self.ports = Ports(*(free_port() for _ in range(5)))
        self._proxy_port = proxy_port or self.ports.proxied
        self._log = directory / "broker.log"
        self._properties = directory / "server.properties"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.authority = Authority(directory / "authority")

    @property
    def servers(self) -> str:
        return f"{LOOPBACK}:{self.ports.clear}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the broker and wait until it answers."""
        if not self._properties.exists():
            self._format()
        command = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._java(*command, "kafka.Kafka", str(self._properties)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us; we stop the broker
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop(immediate=True)
                raise RuntimeError(f"the broker did not start: {self._log.read_text()[-3000:]}")

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the broker; what it was sent stays on disk."""
        process, self._process = self._process, None
        if process is None:
            return
        if immediate:
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_TIMEOUT_S)

    def restart(self, *, immediate: bool = False) -> None:
        self.stop(immediate=immediate)
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(immediate=True)

    def _answers(self) -> bool:
        client = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        try:
            return bool(client.list_topics(timeout=1).brokers)
        except KafkaException:
            time.sleep(_POLL_S)
            return False

    def _java(self, *arguments: str) -> list[str]:
        return [str(find_java() / "bin" / "java"), "-cp", f"{kafka_jars()}/*", *arguments]

    def _format(self) -> None:
        self._write_properties()
        scram = f"SCRAM-SHA-256=[name={USER},password={PASSWORD}]"
        format_it = ("kafka.tools.StorageTool", "format", "-t", _CLUSTER, "--add-scram", scram)
        run = subprocess.run(
            self._java("-XX:TieredStopAtLevel=1", *format_it, "-c", str(self._properties)),
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
        )
        if run.returncode:
            self._properties.unlink()
            raise RuntimeError(f"the broker's storage was not made: {run.stdout}{run.stderr}")

    def _write_properties(self) -> None:
        chain, key = self.authority.sign("DNS:localhost,IP:127.0.0.1")
        store = self.directory / "server.pem"
        store.write_text(key.read_text() + chain.read_text())
        ports = self.ports
        listeners = {
            "CLEAR": ports.clear,
            "PROXIED": ports.proxied,
            "TLS": ports.tls,
            "SASL": ports.sasl,
        }
        advertised = listeners | {"PROXIED": self._proxy_port}
        properties = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{LOOPBACK}:{ports.controller}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "CLEAR",
            "listeners": _addresses(listeners | {"CONTROLLER": ports.controller}),
            "advertised.listeners": _addresses(advertised),
            "listener.security.protocol.map": "CLEAR:PLAINTEXT,PROXIED:PLAINTEXT,"
            "CONTROLLER:PLAINTEXT,TLS:SSL,SASL:SASL_SSL",
            "log.dirs": self.directory / "data",
            "log.retention.bytes": 1 << 30,
            "message.max.bytes": MESSAGE_BYTES_MAX,
            "num.partitions": 1,
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
            "controlled.shutdown.enable": "false",
            # A broker that was killed may come back once its session has ended.
            "broker.session.timeout.ms": 3000,
            "broker.heartbeat.interval.ms": 500,
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": store,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": self.authority.certificate,
            "listener.name.tls.ssl.client.auth": "required",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,OAUTHBEARER",
            "listener.name.sasl.plain.sasl.jaas.config": f"{_LOGIN}.plain.PlainLoginModule "
            f'required user_{USER}="{PASSWORD}";',
            "listener.name.sasl.scram-sha-256.sasl.jaas.config": f"{_LOGIN}.scram."
            "ScramLoginModule required;",
            "listener.name.sasl.oauthbearer.sasl.jaas.config": f"{_LOGIN}.oauthbearer."
            'OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";',
        }
        lines = [f"{name}={value}\n" for name, value in properties.items()]
        self._properties.write_text("".join(lines))


def _addresses(listeners: dict[str, int]) -> str:
    return ",".join(f"{name}://{LOOPBACK}:{port}" for name, port in listeners.items())
