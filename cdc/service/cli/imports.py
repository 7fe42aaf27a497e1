"""``walbrook import``: another product's configuration file as one of ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from cdc.errors import OperatorError
from cdc.service.cli.options import DEFAULT_CONFIG, AsJson, command_group, print_json

import_app = command_group()

_YAML = (".yaml", ".yml")


@import_app.command("import")
def import_file(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A sequin.yaml, or properties or JSON of a Debezium connector."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.")
    ] = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Write walbrook.yaml from a sequin.yaml, or from the properties of a Debezium connector."""
    from cdc.service.imports.debezium import import_debezium
    from cdc.service.imports.sequin import import_sequin

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise OperatorError(f"{file} cannot be read: {why}", fix="give a readable file") from None
    found = (import_sequin if file.suffix.lower() in _YAML else import_debezium)(text)
    written = found.text(file.name)
    found.check(written)
    _write(output, written)
    if as_json:
        print_json(
            {
                "written": str(output),
                "remarks": [{"where": r.where, "what": r.what, "do": r.do} for r in found.remarks],
            }
        )
        return
    typer.echo(
        f"wrote {output}: {len(found.databases)} databases, {len(found.sinks)} sinks; "
        f"{len(found.remarks)} remarks"
    )
    for remark in found.remarks:
        typer.echo(f"  {remark.where}: {remark.what}\n    {remark.do}")


def _write(path: Path, text: str) -> None:
    """Only its owner reads it: passwords of the other file are in it as they were there."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise OperatorError(
            f"{path} is there already, and is not overwritten",
            fix="name another with --output, or remove it",
        ) from None
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
