"""A census as a table, as JSON and as a picture."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from serving.census import CLASSES, Census
from serving.trace import StepFacts

COLOURS = (
    "#2b6cb0",
    "#3182ce",
    "#805ad5",
    "#38a169",
    "#d69e2e",
    "#718096",
    "#319795",
    "#d53f8c",
    "#a0aec0",
    "#ecc94b",
    "#fed7d7",
    "#fc8181",
    "#e53e3e",
)
_WIDTH, _BAR, _ROW = 960, 56, 22


def census_rows(found: Census) -> list[list[str]]:
    """A heading and one row a class, in fixed order, with the sum last."""
    rows = [["class", "ms/step", "share", "kernels/step"]]
    for name in CLASSES:
        if value := found.milliseconds.get(name, 0.0):
            share = f"{100 * value / found.step_ms:.1f} %"
            rows.append([name, f"{value:.3f}", share, f"{found.kernels.get(name, 0.0):.1f}"])
    number = sum(found.kernels.values())
    return [*rows, ["step", f"{found.step_ms:.3f}", "100.0 %", f"{number:.1f}"]]


def census_to_dict(
    found: Census, facts: StepFacts, unprofiled_step_ms: float | None = None
) -> dict[str, Any]:
    """Ready for JSON; `idle_fraction` is calibrated where an unprofiled step time is known."""
    calibrated = found.calibrated_idle_fraction(unprofiled_step_ms) if unprofiled_step_ms else None
    return {
        "profiled_step_ms": found.step_ms,
        "unprofiled_step_ms": unprofiled_step_ms,
        "num_steps": found.num_steps,
        "idle_fraction": found.idle_fraction if calibrated is None else calibrated,
        "idle_fraction_profiled": found.idle_fraction,
        "milliseconds": {n: found.milliseconds.get(n, 0.0) for n in CLASSES},
        "kernels": {n: found.kernels.get(n, 0.0) for n in CLASSES},
        "graphs_per_step": facts.graphs,
        "small_graphs_per_step": facts.small_graphs,
        "eager_kernels_per_step": facts.eager_kernels,
        "synchronizations_per_step": facts.synchronizations,
        "unclassified": [list(item) for item in found.others],
    }


def census_svg(found: Census, title: str) -> str:
    """One bar, a part of it for each class, and a legend."""
    shown = [(n, c) for n, c in zip(CLASSES, COLOURS, strict=True) if found.milliseconds.get(n)]
    height = 2 * _BAR + _ROW * (len(shown) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="14">',
        f'<text x="0" y="16">{html.escape(title)}: {found.step_ms:.3f} ms a step</text>',
    ]
    x = 0.0
    for number, (name, colour) in enumerate(shown):
        value = found.milliseconds[name]
        width = _WIDTH * value / found.step_ms
        text = f"{name}: {value:.3f} ms, {100 * value / found.step_ms:.1f} %"
        y = 2 * _BAR + _ROW * number
        parts += [
            f'<rect x="{x:.2f}" y="26" width="{width:.2f}" height="{_BAR}" fill="{colour}">'
            f"<title>{html.escape(text)}</title></rect>",
            f'<rect x="0" y="{y}" width="14" height="14" fill="{colour}"/>',
            f'<text x="22" y="{y + 12}">{html.escape(text)}</text>',
        ]
        x += width
    return "\n".join([*parts, "</svg>"]) + "\n"


def write_picture(path: Path, found: Census, title: str) -> None:
    """Write the picture; a path that ends in .html gets a page with the table too."""
    picture = census_svg(found, title)
    if path.suffix == ".html":
        cells = "".join(
            "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>"
            for row in census_rows(found)
        )
        picture = (
            f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"
            f"{picture}<table>{cells}</table>\n"
        )
    path.write_text(picture, encoding="utf-8")
