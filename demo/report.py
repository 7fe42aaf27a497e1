"""What the demo shows: how it goes while it runs, and the verdict at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich.table import Table

from demo.change import Change
from demo.compare import Comparison
from demo.latency import Latencies, Seconds
from demo.progress import ConsumerProgress

_FINDINGS_SHOWN: Final = 5
_VERDICTS: Final = {True: "[green]agrees[/]", False: "[red]differs[/]"}


@dataclass(frozen=True)
class SinkResult:
    """One sink after the run."""

    comparison: Comparison
    arrived: list[Change]
    latencies_ms: Latencies


def progress_table(written: int, elapsed_s: float, consumers: Sequence[ConsumerProgress]) -> Table:
    """One line per sink while the shop is open."""
    rate = written / elapsed_s if elapsed_s else 0.0
    table = Table(
        title=f"{elapsed_s:4.1f} s   {written:,} changes written   {rate:,.0f}/s",
        title_justify="left",
    )
    table.add_column("sink")
    for heading in ("arrived", "of written", "per second", "lag", "lag s"):
        table.add_column(heading, justify="right")
    for consumer in consumers:
        share = consumer.delivered / written if written else 1.0
        table.add_row(
            consumer.name,
            f"{consumer.delivered:,}",
            f"{share:.0%}",
            f"{consumer.delivered / elapsed_s if elapsed_s else 0:,.0f}",
            f"{consumer.lag_bytes:,} B",
            f"{consumer.lag_s:.2f}",
        )
    return table


def verdict_table(results: Sequence[SinkResult]) -> Table:
    """One column per sink: what was compared, and whether it agrees."""
    table = Table(title="Written against arrived", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result.comparison.sink, justify="right")
    found = [result.comparison for result in results]
    measures: dict[str, list[int]] = {
        "written": [each.written for each in found],
        "arrived": [each.arrived for each in found],
        "missing": [len(each.missing) for each in found],
        "unexpected": [len(each.unexpected) for each in found],
        "duplicates": [len(each.duplicates) for each in found],
        "out of order": [len(each.out_of_order) for each in found],
        "different values": [len(each.different) for each in found],
        "rows that differ after a replay": [len(each.state) for each in found],
    }
    for name, counts in measures.items():
        table.add_row(name, *(f"{count:,}" for count in counts))
    for percent in (50, 99):
        shown = [_percentile(result.latencies_ms.customers, percent) for result in results]
        table.add_row(f"commit to arrival, p{percent}", *shown)
    imported = [_percentile(result.latencies_ms.imported, 99) for result in results]
    table.add_row("the import in one transaction, p99", *imported)
    table.add_row("verdict", *(_VERDICTS[each.agrees] for each in found))
    return table


def counts_table(written: Sequence[Change], results: Sequence[SinkResult]) -> Table:
    """How many of each table and action, at the source and at every sink."""
    table = Table(title="Changes by table and action", title_justify="left")
    for heading in ("table", "action"):
        table.add_column(heading)
    table.add_column("written", justify="right")
    expected = _counted(written)
    found = [_counted(result.arrived) for result in results]
    for result in results:
        table.add_column(result.comparison.sink, justify="right")
    for kind in sorted(expected.keys() | {kind for counts in found for kind in counts}):
        table.add_row(*kind, f"{expected[kind]:,}", *(f"{counts[kind]:,}" for counts in found))
    return table


def findings(results: Sequence[SinkResult]) -> list[str]:
    """What differs, in sentences; the first few a sink."""
    lines = []
    for result in results:
        wrong = result.comparison.findings
        lines += [f"{result.comparison.sink}: {each}" for each in wrong[:_FINDINGS_SHOWN]]
        if len(wrong) > _FINDINGS_SHOWN:
            lines.append(f"{result.comparison.sink}: and {len(wrong) - _FINDINGS_SHOWN:,} more")
    return lines


def _counted(changes: Sequence[Change]) -> Counter[tuple[str, str]]:
    return Counter((change.table, change.action) for change in changes)


def _percentile(latencies_ms: Seconds, percent: int) -> str:
    return f"{np.percentile(latencies_ms, percent):,.0f} ms" if len(latencies_ms) else "-"
