"""The end of a run in one table: accept length before and after, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def accept_table(first: dict[str, Any] | None, last: dict[str, Any]) -> Table:
    """Accept length per domain at the start and at the end, and α_k at the end.

    Args:
        first, last: one temperature's report, as `AcceptReport.to_dict` gives it.
    """
    table = Table(title="accept length (tokens per verify step, bonus token included)")
    block_size = len(last["domains"]["all"]["alpha"])
    table.add_column("domain")
    if first is not None:
        table.add_column("start", justify="right")
    table.add_column("end", justify="right")
    for k in range(block_size):
        table.add_column(f"α{k + 1}", justify="right")
    names = sorted(last["domains"], key=lambda name: (name == "all", name))
    for name in names:
        row = last["domains"][name]
        cells = [name]
        if first is not None:
            before = first["domains"].get(name)
            cells.append("-" if before is None else f"{before['accept_length']:.2f}")
        cells.append(f"{row['accept_length']:.2f}")
        cells += ["-" if a is None else f"{a:.2f}" for a in row["alpha"]]
        table.add_row(*cells, style="bold" if name == "all" else None)
    return table


def settings_line(report: dict[str, Any]) -> str:
    """Under which settings a report was measured."""
    settings = report["settings"]
    parts = [f"{key} {settings[key]}" for key in ("temperature", "rule", "max_new_tokens")]
    return f"measured with {', '.join(parts)}, draft of step {settings.get('draft_step', '?')}"


def print_summary(
    console: Console,
    first: dict[str, Any] | None,
    final: dict[str, Any],
    export: str,
    commands: Sequence[str],
) -> None:
    """Print the closing table, the export's place and the commands that serve it."""
    main, *others = final["reports"]
    console.print(accept_table(first, main))
    console.print(settings_line(main), soft_wrap=True)
    for report in others:
        value = report["domains"]["all"]["accept_length"]
        console.print(f"accept length {value:.2f}, {settings_line(report)}", soft_wrap=True)
    console.print(f"\nexport: {export}", soft_wrap=True)
    console.print("serve it on a GPU with SGLang:", soft_wrap=True)
    for line in commands:
        console.print(f"  {line}", soft_wrap=True, highlight=False)
