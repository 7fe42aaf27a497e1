"""The parts of a Kafka destination: its topics, TLS and authentication."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from cdc.config.scalars import ConfText, Flag, Integer, LocalPath, Section, Text, wrong
from cdc.config.secrets import SecretText

TOPIC_CHARACTERS_MAX: Final = 249
_SERVER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:,/@]+):[0-9]{1,5}")
_PLACEHOLDER = re.compile(r"\{(schema|table|sink)\}")
_TOPIC = re.compile(r"[a-zA-Z0-9._-]+")


def _server(text: str) -> str:
    if not _SERVER.fullmatch(text):
        raise wrong("should be a server such as kafka.example.com:9092")
    return text


def _template(text: str) -> str:
    rest = _PLACEHOLDER.sub("x", text)
    if not _TOPIC.fullmatch(rest) or len(text) > TOPIC_CHARACTERS_MAX:
        raise wrong(
            f"should be a topic of at most {TOPIC_CHARACTERS_MAX} letters, digits, ., _ and -, "
            "with {schema}, {table} and {sink} for parts of it"
        )
    return text


def _topic(text: str) -> str:
    if not _TOPIC.fullmatch(text) or len(text) > TOPIC_CHARACTERS_MAX or text in (".", ".."):
        raise wrong(
            f"should be a topic of at most {TOPIC_CHARACTERS_MAX} letters, digits, ., _ and -"
        )
    return text


def _token_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise wrong("should be a URL such as https://login.example.com/oauth2/token")
    return url


KafkaServer = Annotated[str, AfterValidator(_server)]
TopicTemplate = Annotated[str, AfterValidator(_template)]
TopicName = Annotated[str, AfterValidator(_topic)]


class KafkaTopics(Section):
    """How topics that do not exist are created."""

    partitions: Annotated[Integer, Field(ge=1, le=10_000)] | None = Field(
        default=None, description="Partitions of a new topic; if not given, the broker's default."
    )
    replication_factor: Annotated[Integer, Field(ge=1, le=100)] | None = Field(
        default=None, description="Copies of a new topic; if not given, the broker's default."
    )
    config: dict[str, ConfText] = Field(
        default_factory=dict,
        description="Settings of a new topic, such as cleanup.policy: compact.",
    )


class KafkaTls(Section):
    """How TLS is verified, and the client's own certificate."""

    verify: Flag = Field(default=True, description="Verify the server's certificate and name.")
    ca_file: LocalPath | None = Field(
        default=None, description="File of trusted certificates; if not given, the system's."
    )
    certificate_file: LocalPath | None = Field(
        default=None, description="The client's certificate chain (PEM), for brokers that ask."
    )
    key_file: LocalPath | None = Field(
        default=None, description="The private key of the client's certificate (PEM)."
    )
    key_password: SecretText | None = Field(default=None, description="Password of key_file.")

    @model_validator(mode="after")
    def _parts_belong_together(self) -> Self:
        if self.ca_file is not None and not self.verify:
            raise wrong("ca_file has no use with verify: false; take one of them out")
        if (self.certificate_file is None) != (self.key_file is None):
            raise wrong("certificate_file and key_file need each other; give both")
        if self.key_password is not None and self.key_file is None:
            raise wrong("key_password has no use without key_file; give both")
        return self


_BY_PASSWORD: Final = ("username", "password")
_BY_TOKEN: Final = ("token_url", "client_id", "client_secret")


class KafkaSasl(Section):
    """Authentication by SASL."""

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = Field(
        description="PLAIN, SCRAM-SHA-256 and SCRAM-SHA-512 take username and password. "
        "OAUTHBEARER takes token_url, client_id and client_secret (client credentials)."
    )
    username: Text | None = Field(default=None, description="User to authenticate as.")
    password: SecretText | None = Field(default=None, description="Password to authenticate with.")
    token_url: Annotated[str, AfterValidator(_token_url)] | None = Field(
        default=None, description="Where tokens are issued."
    )
    client_id: Text | None = Field(default=None, description="Client that a token is asked for.")
    client_secret: SecretText | None = Field(default=None, description="Secret of that client.")
    scope: Text | None = Field(default=None, description="Scope that is asked for.")
    token_ca_file: LocalPath | None = Field(
        default=None,
        description="File of certificates that are trusted at token_url; if not given, the "
        "system's.",
    )

    @model_validator(mode="after")
    def _credentials_fit(self) -> Self:
        by_token = self.mechanism == "OAUTHBEARER"
        needed, others = (_BY_TOKEN, _BY_PASSWORD) if by_token else (_BY_PASSWORD, _BY_TOKEN)
        if any(getattr(self, key) is None for key in needed):
            raise wrong(f"mechanism {self.mechanism} needs {', '.join(needed)}; give all of them")
        if not by_token:
            others = (*others, "scope", "token_ca_file")
        given = [key for key in others if getattr(self, key) is not None]
        if given:
            raise wrong(
                f"mechanism {self.mechanism} has no use for {', '.join(given)}; take it out"
            )
        return self
