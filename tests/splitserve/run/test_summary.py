"""What one reads at the end of a run."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from splitserve.run.summary import accept_table, print_summary, settings_line


def one(
    domains: dict[str, float], alpha: list[float | None], temperature: float = 0.0
) -> dict[str, Any]:
    return {
        "block_size": len(alpha),
        "settings": {
            "temperature": temperature,
            "rule": "greedy",
            "max_new_tokens": 64,
            "draft_step": 450,
        },
        "domains": {
            name: {"accept_length": value, "alpha": alpha} for name, value in domains.items()
        },
    }


START = one({"all": 1.0, "math": 1.01}, [0.02, None, None])
END = one({"all": 2.0, "math": 2.34, "code": 1.9}, [0.61, 0.52, None])


def rendered(renderable: object, width: int = 100) -> list[list[str]]:
    """A table's rows, cell by cell."""
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return [[c.strip() for c in x.strip("│┃").replace("┃", "│").split("│")] for x in lines]


def test_the_table_holds_domains_and_positions() -> None:
    rows = rendered(accept_table(START, END))
    assert ["domain", "start", "end", "α1", "α2", "α3"] in rows
    assert ["math", "1.01", "2.34", "0.61", "0.52", "-"] in rows
    assert ["all", "1.00", "2.00", "0.61", "0.52", "-"] in rows
    # A domain that was not measured at the start has no figure there.
    assert ["code", "-", "1.90", "0.61", "0.52", "-"] in rows
    names = [row[0] for row in rows if row[0] in ("all", "code", "math")]
    assert names == ["code", "math", "all"]


def test_without_a_start_there_is_no_column_for_it() -> None:
    rows = rendered(accept_table(None, END))
    assert ["domain", "end", "α1", "α2", "α3"] in rows
    assert ["math", "2.34", "0.61", "0.52", "-"] in rows


def test_the_settings_line_says_what_the_figures_hang_on() -> None:
    line = settings_line(END)
    for text in ("temperature 0.0", "rule greedy", "max_new_tokens 64", "draft of step 450"):
        assert text in line


def test_the_summary_ends_with_the_command_on_one_line() -> None:
    console = Console(file=io.StringIO(), width=60)
    command = "python -m sglang.launch_server --model-path " + "x" * 80
    final = {"full": True, "reports": [END, one({"all": 1.75}, [0.5, 0.4, 0.3], 0.8)]}
    print_summary(console, START, final, "runs/r/1/export", [command])
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "accept length 1.75, measured with temperature 0.8" in text
    assert "export: runs/r/1/export" in text
    assert text.endswith(f"  {command}\n")
