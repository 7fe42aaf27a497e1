"""Where the content of oversize messages goes, in place of a dead letter."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, Field

from cdc.config.scalars import Integer, Section, Text, wrong


def _url(url: str) -> str:
    parts = urlsplit(url)
    if not parts.scheme or "://" not in url:
        raise wrong("should be a URL such as s3://bucket/folder or file:///var/lib/walbrook/claims")
    if "@" in parts.netloc or {"access_key", "secret_key"} & parse_qs(parts.query).keys():
        raise wrong(
            "should hold no user or password; give them by the environment, as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return url


class ClaimCheck(Section):
    """Where the content of oversize messages is stored, and for how long."""

    url: Annotated[Text, AfterValidator(_url)] | None = Field(
        default=None,
        description="Folder that it is written to: file://, s3://, gs:// or another URL that Arrow "
        "knows. If not given, it is stored in walbrook.claim_checks of the state database.",
    )
    retain_days: Annotated[Integer, Field(ge=1, le=3650)] = Field(
        default=7, description="After how many days it is removed."
    )
