"""What the demo shows: how it goes while it runs, and the verdict at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich.table import Table

from cdc.service.example.change import Change
from cdc.service.example.compare import Comparison
from cdc.service.example.latency import Seconds
from cdc.service.example.progress import ConsumerProgress

_FINDINGS_SHOWN: Final = 5


@dataclass(frozen=True)
class SinkResult:
    """One sink after the run."""

    comparison: Comparison
    arrived: list[Change]
    latencies_ms: Seconds


def progress_table(written: int, elapsed_s: float, consumers: Sequence[ConsumerProgress]) -> Table:
    """One line a sink while the shop is open."""
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
    """One line a sink: what was compared, and whether it agrees."""
    table = Table(title="Written against arrived", title_justify="left")
    table.add_column("sink", no_wrap=True)
    for heading in (
        "written", "arrived", "missing", "unexp.", "dupl.", "order", "values", "state", "p50 ms",
        "p99 ms",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for result in results:
        found = result.comparison
        counted = (
            found.missing, found.unexpected, found.duplicates, found.out_of_order, found.different,
            found.state,
        )  # fmt: skip
        table.add_row(
            found.sink,
            f"{found.written:,}",
            f"{found.arrived:,}",
            *(f"{len(each):,}" for each in counted),
            _percentile(result.latencies_ms, 50),
            _percentile(result.latencies_ms, 99),
            "[green]agrees[/]" if found.agrees else "[red]differs[/]",
        )
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
    return f"{np.percentile(latencies_ms, percent):,.0f}" if len(latencies_ms) else "-"
