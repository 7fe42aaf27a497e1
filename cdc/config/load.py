"""Read a configuration file, or say everything that is wrong with it at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from cdc.config.document import Data, Document, parse
from cdc.config.model import Config, SinkNames, name_problems
from cdc.config.problems import Problem, model_problems
from cdc.errors import ConfigError


def load(
    path: Path, environ: Mapping[str, str] = os.environ, *, base: Path | None = None
) -> Config:
    """Read the file at ``path``; relative paths in it begin at ``base``, else at its folder."""
    return _read(read_file(path), base or path.resolve().parent, environ, str(path))


def read_file(path: Path) -> str:
    """The text of a configuration file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {path}: {error.strerror}",
            fix="give the path of a readable file, such as examples/walbrook.yaml",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", fix="save it as UTF-8") from None


def loads(
    text: str,
    base: Path,
    environ: Mapping[str, str] = os.environ,
    *,
    origin: str = "the configuration",
) -> Config:
    """Read a configuration from text; relative paths in it begin at ``base``.

    ``origin`` is what errors call it.
    """
    return _read(text, base, environ, origin)


def _read(text: str, base: Path, environ: Mapping[str, str], origin: str) -> Config:
    document = parse(text, environ)
    if document.data is None:
        raise _refusal(document.problems, origin)
    config, problems = _validate(document, base)
    # Raised here and not in an except clause: the model's own error holds the values it refused.
    if config is None or problems:
        raise _refusal(problems, origin)
    return config


def _validate(document: Document, base: Path) -> tuple[Config | None, list[Problem]]:
    problems = list(document.problems)
    problems += [Problem(at, what, document.line(at)) for at, what in _between_names(document.data)]
    try:
        return Config.model_validate(document.data, context={"base": base}), problems
    except ValidationError as error:
        found = list(model_problems(error))
    # What is explained by an earlier problem at the same place is not said twice.
    fresh = [p for p in found if not any(earlier.concerns(p.location) for earlier in problems)]
    return None, problems + [Problem(p.location, p.what, document.line(p.location)) for p in fresh]


def _between_names(data: Data) -> list[tuple[tuple[str | int, ...], str]]:
    if not isinstance(data, dict):
        return []
    databases = [_get(entry, "name") for entry in _entries(data.get("databases"))]
    sinks = [
        SinkNames(*(_get(entry, key) for key in SinkNames._fields))
        for entry in _entries(data.get("sinks"))
    ]
    return name_problems(databases, sinks)


def _entries(data: Data) -> list[Data]:
    return data if isinstance(data, list) else []


def _get(data: Data, key: str) -> Data:
    return data.get(key) if isinstance(data, dict) else None


def _refusal(problems: list[Problem], origin: str) -> ConfigError:
    ordered = sorted(problems, key=lambda problem: problem.line or 0)
    if len(ordered) == 1:
        return ConfigError(f"{origin}: {ordered[0]}")
    lines = "".join(f"\n  {problem}" for problem in ordered)
    return ConfigError(f"{origin} has {len(ordered)} problems:{lines}")
