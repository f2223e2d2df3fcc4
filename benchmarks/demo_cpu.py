"""Record the demo's figures: `python -m benchmarks.demo_cpu --run FOLDER --setup-seconds X ...`.

The timings are measured outside (`/usr/bin/time -v make demo`, for example) and given here; accept
lengths and who waited for whom are read from the finished run folder. Writes
`benchmarks/results/demo_cpu.json` and prints the same object as its last line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from benchmarks.record import write_record
from splitserve.compose import compose, compose_resumed, setting_paths
from splitserve.run.folder import CONFIG_NAME, EVALS_NAME, METRICS_NAME, read_json_lines

RECIPE = "recipe=smollm2_dspark"
TIMES = (
    "total_seconds",
    "trainer_step_seconds",
    "trainer_wait_seconds",
    "engine_up_seconds",
    "engine_idle_seconds",
)


def run_figures(run: Path) -> dict[str, float]:
    """Accept lengths, conditional acceptance and times of a finished run.

    Raises:
        ValueError: the run has no start, no final report, or has not finished.
    """
    evals = list(read_json_lines(run / EVALS_NAME))
    starts = [e["report"] for e in evals if e["step"] == 0 and not e["report"]["full"]]
    finals = [e["report"] for e in evals if e["report"]["full"]]
    finished = [row for row in read_json_lines(run / METRICS_NAME) if row["kind"] == "finished"]
    if not starts or not finals or not finished:
        raise ValueError(f"--run={run}: not a finished run; wait for it, or go on with resume=true")
    end, *others = finals[-1]["reports"]
    figures: dict[str, float] = {
        "accept_length_start": starts[0]["reports"][0]["domains"]["all"]["accept_length"],
        "accept_length_end": end["domains"]["all"]["accept_length"],
    }
    for place, report in (("start", starts[0]["reports"][0]), ("end", end)):
        for name, row in report["domains"].items():
            if name != "all":
                figures[f"accept_length_{place}_{name}"] = row["accept_length"]
    for k, alpha in enumerate(end["domains"]["all"]["alpha"], start=1):
        # A position that no round reached has no rate.
        if alpha is not None:
            figures[f"alpha_{k}"] = alpha
    for k, report in enumerate(others):
        suffix = "" if k == 0 else f"_{report['settings']['temperature']}"
        figures[f"accept_length_sampled{suffix}"] = report["domains"]["all"]["accept_length"]
        figures[f"sampled_temperature{suffix}"] = report["settings"]["temperature"]
    last = finished[-1]
    figures |= {"steps": last["step"], "best_step": last["best_step"]}
    figures |= {name: last[name] for name in TIMES}
    figures["held_out_prompts"] = end["domains"]["all"]["num_requests"]
    return figures


def command(run: Path) -> str:
    """The command that gives these settings: the recipe, and what the run had otherwise."""
    ran, shipped = compose_resumed(run / CONFIG_NAME, []), compose([RECIPE])
    changed = []
    for path in setting_paths():
        value = attrgetter(path)(ran)
        # Where the run folder and the installed recipe lie says nothing about the figures.
        if path in ("run_dir", "resume") or value == attrgetter(path)(shipped):
            continue
        if path == "data.prompts" and Path(value).name == Path(shipped.data.prompts).name:
            continue
        changed.append(f"{path}={value}")
    return " ".join(["splitserve train", RECIPE, *changed])


def main(argv: Sequence[str] | None = None) -> int:
    """Write the record and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, required=True, help="folder of the finished demo")
    for name in ("setup-seconds", "demo-seconds", "tests-seconds", "peak-memory-gb"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--out", type=Path, help="folder of the record")
    options = parser.parse_args(argv)
    if not (options.run / CONFIG_NAME).is_file():
        parser.error(f"--run={options.run}: no run folder")
    given = ("setup_seconds", "demo_seconds", "tests_seconds", "peak_memory_gb")
    try:
        figures = {**{n: getattr(options, n) for n in given}, **run_figures(options.run)}
    except ValueError as error:
        parser.error(str(error))
    write_record("demo_cpu", figures, command=command(options.run), folder=options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
