"""Figures of a finished run on GPUs: `python -m benchmarks.gpu_loop STEP --run FOLDER ...`.

Steps, each a process of its own since each loads a target:

    plain      the target alone in SGLang: TPOT of one request at a time
    cold       the exported draft in a newly started SGLang: accept length, TPOT
    embedded   the exported draft by the embedded decoder, on the same prompts, greedy
    record     puts what the steps left in the run folder together with the run's own figures

The steps write `bench_STEP.json` into the run folder, `record` a file in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.demo_cpu import run_figures
from benchmarks.options import positive, record_file, run_folder
from benchmarks.record import write_record
from splitserve.compose import compose_resumed
from splitserve.eval.spec import EvaluatorSpec
from splitserve.run.folder import CONFIG_NAME, EVALS_NAME, METRICS_NAME, RunFolder, read_json_lines
from splitserve.run.plan import Plan, evaluator_spec, longest_request, make_plan
from splitserve.serving_options import CONTEXT_MARGIN_TOKENS
from splitserve.settings import RunSettings
from splitserve.target.info import context_window

STEPS = ("plain", "cold", "embedded")
EMBEDDED_BATCH = 180


def load(run: Path) -> tuple[RunSettings, Plan, EvaluatorSpec]:
    """The run's settings, its plan, and what it measured with."""
    settings = replace(compose_resumed(run / CONFIG_NAME, []), resume=True)
    plan = make_plan(settings)
    return settings, plan, evaluator_spec(settings, plan)


def served(run: Path, *, with_draft: bool, num_single: int, single_tokens: int) -> dict[str, Any]:
    """Accept length on every held-out prompt, and times of `num_single` of them one by one."""
    from dspark.checkpoint import read_config
    from serving.measure import measure
    from serving.offline import OfflineEngine, OfflineSettings

    settings, plan, spec = load(run)
    places = longest_request(settings, plan) + CONTEXT_MARGIN_TOKENS
    export = str(RunFolder(run).export.resolve())
    engine_settings = OfflineSettings(
        target_path=spec.target_path,
        draft_path=export if with_draft else "",
        dtype=spec.dtype,
        # SGLang keeps some tokens back; more places than the target has it refuses.
        context_length=min(places, context_window(plan.target.config) or places),
        max_running_requests=settings.engine.max_running_requests,
        attention_backend=settings.engine.attention_backend,
        memory_fraction=0.5,
    )
    block_size = read_config(export).block_size if with_draft else 0
    found: dict[str, Any] = {}
    with OfflineEngine(engine_settings, spec.eos_token_ids) as engine:
        found["start_seconds"] = engine.start_seconds
        common: dict[str, Any] = {"block_size": block_size, "temperature": 0.0, "settings": {}}
        # One pass first: what the measured one meets must be compiled by then.
        for name in ("warm", "all"):
            report = engine.run(
                measure(
                    engine.decode,
                    spec.prompts,
                    max_new_tokens=spec.max_new_tokens,
                    concurrency=spec.batch_size,
                    **common,
                )
            )
            found[name] = report.to_dict()
        single = spec.prompts[:: max(1, len(spec.prompts) // num_single)][:num_single]
        report = engine.run(
            measure(engine.decode, single, max_new_tokens=single_tokens, concurrency=1, **common)
        )
        found["single"] = report.to_dict()
    return found


def embedded(run: Path) -> dict[str, Any]:
    """The report of the embedded decoder, greedy, on every held-out prompt."""
    from splitserve.eval.measure import evaluate_draft

    _, _, spec = load(run)
    export = str(RunFolder(run).export.resolve())
    # A round takes its launches' time however many rows it has.
    spec = replace(spec, num_threads=8, batch_size=EMBEDDED_BATCH)
    return evaluate_draft(spec, export, full=False)["reports"][0]


def loop_figures(run: Path) -> dict[str, float]:
    """What the finished run itself measured: accept lengths by step, who waited, rates, updates."""
    figures = run_figures(run) | accept_curve(run) | pace_figures(run)
    for row in read_json_lines(run / METRICS_NAME):
        if row["kind"] == "data" and "prompts" in row:
            figures["prompts"] = row["prompts"]["used"]
    busy = figures["trainer_step_seconds"] + figures["trainer_wait_seconds"]
    figures["trainer_wait_fraction"] = figures["trainer_wait_seconds"] / busy
    figures["engine_idle_fraction"] = figures["engine_idle_seconds"] / figures["engine_up_seconds"]
    return figures


def accept_curve(run: Path) -> dict[str, float]:
    """The accept lengths measured on the way."""
    return {
        f"accept_length_step_{row['step']}": row["report"]["reports"][0]["domains"]["all"][
            "accept_length"
        ]
        for row in read_json_lines(run / EVALS_NAME)
        if not row["report"]["full"]
    }


def pace_figures(run: Path) -> dict[str, float]:
    """Rates, shares of waiting, updates and memory, also of a run that was stopped.

    Means over the logged intervals but the first quarter, in which the target starts, the trainers
    compile and the first batch is waited for.
    """
    train: list[dict[str, Any]] = []
    for row in read_json_lines(run / METRICS_NAME):
        if row["kind"] != "train":
            continue
        # A resumed run's clock starts again.
        if train and row["elapsed_seconds"] < train[-1]["elapsed_seconds"]:
            train.clear()
        train.append(row)
    if len(train) < 4:
        raise ValueError(f"--run={run}: {len(train)} logged intervals; let it go on to four")
    settled = train[len(train) // 4 :]
    first, last = settled[0], settled[-1]
    batch = compose_resumed(run / CONFIG_NAME, []).train.global_batch_size
    seconds = last["elapsed_seconds"] - first["elapsed_seconds"]
    figures = {"samples_per_second": batch * (last["step"] - first["step"]) / seconds}
    means = ("trainer_wait_fraction", "engine_idle_fraction", "ring_fill")
    rates = ("target_tokens_per_second", "answers_per_second", "rank_0_tflop_per_s")
    for name in (*means, *(rate for rate in rates if rate in first)):
        figures[name] = statistics.fmean(row[name] for row in settled)
    if "trainer_peak_memory_gb" not in last:
        raise ValueError(f"--run={run}: a run without GPUs; name one that had them")
    figures["trainer_peak_memory_gb"] = last["trainer_peak_memory_gb"]
    for name in (name for name in last if name.startswith("gpu_")):
        figures[name] = max(row[name] for row in train)
    reports = [r for row in read_json_lines(run / EVALS_NAME) for r in row["report"]["reports"]]
    updates = [r["timings"]["hot_update_seconds"] for r in reports if "timings" in r]
    if updates:
        figures["hot_update_seconds"] = statistics.median(updates)
    figures["hot_updates_from_device"] = sum(
        r["settings"].get("draft_source") == "device" for r in reports
    )
    margins = [r["settings"].get("proposal_margin", 0.0) for r in reports]
    figures["largest_proposal_margin_logits"] = max(margins, default=0.0)
    return figures


def record(
    run: Path,
    name: str,
    extra: Sequence[Mapping[str, Any]],
    command: str,
    like: Mapping[str, Any] | None,
) -> None:
    """Write the record of a finished run with what its steps have measured."""
    figures: dict[str, Any] = loop_figures(run)
    figures["accept_length_served"] = figures["accept_length_end"]
    for step in STEPS:
        path = run / f"bench_{step}.json"
        if not path.is_file():
            continue
        found = json.loads(path.read_text())
        if step == "embedded":
            for domain, row in found["domains"].items():
                ending = "" if domain == "all" else f"_{domain}"
                figures[f"accept_length_embedded{ending}"] = row["accept_length"]
            continue
        prefix = "plain_" if step == "plain" else ""
        figures[f"{prefix}mean_tpot_ms"] = found["single"]["timings"]["mean_tpot_ms"]
        figures[f"{prefix}loaded_mean_tpot_ms"] = found["all"]["timings"]["mean_tpot_ms"]
        figures[f"{prefix}output_tokens_per_second"] = found["all"]["timings"][
            "output_tokens_per_second"
        ]
        if step == "cold":
            domains = found["all"]["domains"]
            figures["accept_length_cold_start"] = domains["all"]["accept_length"]
            figures["accept_length_single"] = found["single"]["domains"]["all"]["accept_length"]
    for other in extra:
        figures |= other["figures"]
    write_record(name, figures, command=command, like=like)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("step", choices=[*STEPS, "record"])
    parser.add_argument("--run", type=run_folder, required=True, help="folder of the finished run")
    parser.add_argument("--num-single", type=positive, default=40, help="answered one by one")
    parser.add_argument("--single-tokens", type=positive, default=256, help="longest of those")
    parser.add_argument("--name", default="gpu1_smollm2", help="name of the record")
    parser.add_argument("--add", type=record_file, nargs="*", default=[], help="records to take in")
    parser.add_argument("--like", type=record_file, help="a record from the machine of the run")
    parser.add_argument("--command", default="", help="the command that made the run")
    options = parser.parse_args(argv)
    if options.step == "record":
        try:
            record(options.run, options.name, options.add, options.command, options.like)
        except ValueError as error:
            parser.error(str(error))
        return 0
    if options.step == "embedded":
        found = embedded(options.run)
    else:
        found = served(
            options.run,
            with_draft=options.step == "cold",
            num_single=options.num_single,
            single_tokens=options.single_tokens,
        )
    (options.run / f"bench_{options.step}.json").write_text(json.dumps(found))
    print(json.dumps(found)[:2000])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
