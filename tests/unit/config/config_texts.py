"""The smallest valid file, and ways to vary it."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest

from cdc.config import Config, loads
from cdc.errors import ConfigError

BASE = Path("/srv/walbrook")
DATABASE = """\
- name: shop
  database: shop
  slot: {name: walbrook}
  publication: {name: walbrook}
"""
FILE = "destination: {type: file, path: out}"
OTHER = "destination: {type: file, path: other}"


def databases(extra: str = "") -> str:
    return "databases:\n" + DATABASE + indent(dedent(extra), "  ") + ("\n" if extra else "")


def sink(body: str) -> str:
    return databases() + "sinks:\n- name: a\n" + indent(dedent(body), "  ") + "\n"


def read(text: str, **environ: str) -> Config:
    return loads(text, BASE, environ)


def refusal(text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, **environ)
    return str(caught.value)
