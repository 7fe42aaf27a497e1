"""``walbrook doctor``: looks at the sources from outside, and prints what helps."""

from __future__ import annotations

from typing import Annotated

import typer

from cdc.errors import WalbrookError
from cdc.service.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    command_group,
    print_json,
)

doctor_app = command_group()


@doctor_app.command()
def doctor(
    source: Annotated[
        str | None, typer.Argument(metavar="[SOURCE]", help="This database alone.")
    ] = None,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Look at each source from outside; status 1 if one cannot be read as it is."""
    from cdc.config import load
    from cdc.service.checks.doctor import Finding, Severity, examine

    settings = load(config)
    chosen = settings.databases if source is None else [settings.database(source)]
    found: dict[str, list[Finding]] = {}
    for database in chosen:
        try:
            found[database.name] = examine(settings, database)
        except WalbrookError as error:
            found[database.name] = [Finding(Severity.PROBLEM, error.what, error.fix)]
    if as_json:
        print_json(
            [
                {"source": name, "severity": each.severity, "what": each.what, "fix": each.fix}
                for name, findings in found.items()
                for each in findings
            ]
        )
    else:
        for name, findings in found.items():
            typer.echo(f"{name}: {_summary(len(findings))}")
            for each in findings:
                fix = each.fix.replace("\n", "\n    ")
                typer.echo(f"  {each.severity}: {each.what}\n    {fix}")
    every = [each for findings in found.values() for each in findings]
    if any(each.severity is Severity.PROBLEM for each in every):
        raise typer.Exit(1)


def _summary(count: int) -> str:
    return "well" if not count else f"{count} finding{'' if count == 1 else 's'}"
