"""One record of several runs: `python -m benchmarks.several_runs NAME --runs LABEL=FOLDER ...`.

For layouts of several GPUs: each run's pace, waits, memory and accept lengths with its label before
their names, and the figures of other records (the ring's) as they are. A run without a label is the
record's own. Runs that were stopped count too: what is taken of them is their pace. A finished one
has its final accept lengths beside it.

Where `--like` names a record with the machine's matrix rate (train_step), `mfu` is rank 0's share
of it, its waiting included. Writes `benchmarks/results/NAME.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.demo_cpu import run_figures
from benchmarks.gpu_loop import accept_curve, pace_figures
from benchmarks.options import record_file, run_folder
from benchmarks.record import write_record
from splitserve.run.folder import METRICS_NAME, read_json_lines


def final_figures(run: Path) -> dict[str, float]:
    """The accept lengths and times of a finished run; nothing of one that was stopped."""
    if any(row["kind"] == "finished" for row in read_json_lines(run / METRICS_NAME)):
        return run_figures(run)
    return {}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", help="of the record")
    parser.add_argument("--runs", nargs="+", required=True, metavar="LABEL=FOLDER")
    parser.add_argument("--add", type=record_file, nargs="*", default=[], help="records to take in")
    parser.add_argument("--like", type=record_file, help="a record from the machine of the runs")
    parser.add_argument("--command", default="", help="the commands that made the runs")
    parser.add_argument("--out", type=Path, help="folder of the record")
    options = parser.parse_args(argv)
    figures: dict[str, float] = {}
    for other in options.add:
        figures |= other["figures"]
    most = (options.like or {}).get("figures", {}).get("matmul_tflops")
    runs = [text.partition("=") for text in options.runs]
    for text, (label, equals, _) in zip(options.runs, runs, strict=True):
        if not equals:
            parser.error(f"--runs {text}: allowed: LABEL=FOLDER; write =FOLDER for no label")
        if [other for other, *_ in runs].count(label) > 1:
            parser.error(f"--runs: the label {label!r} is there twice; allowed: each once")
    for label, _, folder in runs:
        prefix = f"{label}_" if label else ""
        try:
            run = run_folder(folder)
            found = pace_figures(run) | accept_curve(run) | final_figures(run)
            if most and "rank_0_tflop_per_s" in found:
                found["mfu"] = found["rank_0_tflop_per_s"] / most
        except (argparse.ArgumentTypeError, ValueError) as error:
            parser.error(f"--runs: {error}")
        named = {f"{prefix}{name}": value for name, value in found.items()}
        if both := sorted(figures.keys() & named):
            parser.error(f"--runs, --add: two figures {both[0]}; give the run a label of its own")
        figures |= named
    write_record(
        options.name, figures, command=options.command, folder=options.out, like=options.like
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
