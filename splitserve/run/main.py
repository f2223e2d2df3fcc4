"""`splitserve train`: from a command line to a measured and exported draft."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from dspark.checkpoint import verify_export
from serving.launch import launch_command
from serving.version import require_sglang
from splitserve.compose import compose, compose_resumed, recipe_label, split_overrides, to_yaml
from splitserve.errors import RunFailed, UserError
from splitserve.run.coordinator import Coordinator, CoordinatorOptions, Outcome
from splitserve.run.display import Display, duration
from splitserve.run.engines import Engines
from splitserve.run.evaluations import Best, Evaluations, accept_length_of
from splitserve.run.feeder import Feeder
from splitserve.run.folder import RunFolder, write_whole
from splitserve.run.gpus import used_gigabytes
from splitserve.run.plan import Plan, make_plan
from splitserve.run.summary import print_summary
from splitserve.run.workers import Workers, exchange_tensors
from splitserve.settings import RunSettings
from splitserve.trackers import make_tracker
from splitserve.train.checkpoint import read_meta
from splitserve.transport.memory import DeviceMemoryError
from splitserve.transport.rings import Rings
from splitserve.transport.weights import DraftExchange


def train(arguments: Sequence[str]) -> int:
    """Run or resume a training run; 0 when it finished, 130 when it was stopped.

    Raises:
        ValueError: bad input, before any process has started.
        RunFailed: the run had to end.
    """
    console = Console(soft_wrap=True) if not sys.stdout.isatty() else Console()
    settings, folder = open_run(arguments)
    try:
        if settings.engine.kind == "sglang":
            require_sglang()
        console.print(f"run folder: {folder.path}", highlight=False)
        check_checkpoint(settings, folder)
        plan = make_plan(settings, tell=lambda line: console.print(line, highlight=False))
    except (ValueError, KeyboardInterrupt):
        folder.discard()
        raise
    if not settings.resume:
        write_whole(folder.config, to_yaml(settings))
    folder.keep_digest(plan.data.digest)
    folder.write_metrics("data", 0, plan.data.accounts)
    layers = ", ".join(map(str, plan.draft.target_layer_ids))
    console.print(
        f"target {settings.target.name}: {plan.target.num_layers} layers, captured {layers}; "
        f"{plan.schedule.num_samples} samples to train on, {len(plan.held_out)} held-out prompts"
    )
    outcome = _run(settings, folder, plan, console)
    if not outcome.finished:
        console.print(
            f"stopped after {outcome.step} steps; go on with: splitserve train "
            f"recipe={settings.recipe} resume=true run_dir={folder.path}"
            if outcome.checkpoint
            else f"stopped before the first checkpoint; answers so far are kept in {folder.path}"
        )
        return 130
    _finish(settings, folder, plan, outcome, console)
    return 0


def open_run(arguments: Sequence[str]) -> tuple[RunSettings, RunFolder]:
    """The settings and the locked folder of a new or of a resumed run."""
    recipe, overrides = split_overrides(arguments)
    options = dict(o.partition("=")[::2] for o in overrides)
    label = recipe_label(recipe)
    if options.get("resume", "").lower() in ("true", "1", "yes"):
        folder = RunFolder.create(options.get("run_dir", ""), label, resume=True)
        return compose_resumed(folder.config, overrides), folder
    settings = compose(arguments)
    return settings, RunFolder.create(settings.run_dir, label, resume=False)


def check_checkpoint(settings: RunSettings, folder: RunFolder) -> None:
    """Refuse to go on from a checkpoint that the settings do not fit.

    Raises:
        UserError: it is of another number of ranks, or beyond the last step.
    """
    last = folder.last_checkpoint() if settings.resume else None
    if last is None:
        return
    meta = read_meta(last)
    if meta["world_size"] != settings.num_ranks:
        raise UserError(
            "layout.train" if settings.layout.on_gpu else "layout.train_ranks",
            settings.num_ranks,
            f"{meta['world_size']} ranks, as {last} was written with",
            "set it back, or start a new run without resume=true",
        )
    if settings.train.steps < meta["step"]:
        raise UserError(
            "train.steps",
            settings.train.steps,
            f"{meta['step']} or more, which {last} has behind it",
            "raise it, or write that draft with splitserve export checkpoint=last",
        )


def make_rings(settings: RunSettings, plan: Plan) -> Rings:
    """The rings of the plan.

    Raises:
        UserError: something else holds the GPUs' memory.
    """
    try:
        return Rings.create(plan.ring_bytes, plan.ring_layout, plan.placement.groups)
    except DeviceMemoryError as error:
        raise UserError(
            "layout.ring_bytes",
            settings.layout.ring_bytes,
            f"what is free on the target's GPUs; {error}",
            f"set it below {plan.ring_bytes}, or end what else holds their memory",
        ) from error


def _run(settings: RunSettings, folder: RunFolder, plan: Plan, console: Console) -> Outcome:
    last = folder.last_checkpoint() if settings.resume else None
    first_step = read_meta(last)["step"] if last else 0
    responses, best = folder.read_responses(), best_so_far(folder)
    rings = make_rings(settings, plan)
    feeder = Feeder(
        plan.data.entries,
        plan.schedule,
        rings,
        num_ranks=settings.num_ranks,
        micro_batch_size=settings.train.micro_batch_size,
        row_tokens=settings.row_tokens,
        max_in_flight=settings.engine.max_in_flight,
        accept=plan.accept,
        first_step=first_step,
        stored=plan.data.stored,
    )
    for sample_id, row in responses.items():
        entry = feeder.entries.get(sample_id)
        if entry is not None and len(entry.prompt_ids) == row["num_prompt_tokens"]:
            entry.draft_step = row.get("draft_step", -1)
            feeder.answer(entry, row["output_ids"])
    tracker = make_tracker(settings.tracker, folder.path, name=folder.path.name)
    options = CoordinatorOptions(
        num_steps=settings.train.steps,
        max_drop_fraction=settings.data.max_drop_fraction,
        max_restarts=settings.engine.max_restarts,
        early_stop=settings.eval.early_stop,
        machine=partial(used_gigabytes, settings.layout),
        heartbeat_timeout_seconds=settings.layout.heartbeat_timeout_seconds,
    )
    exchange = None
    if settings.speculates:
        gpu = plan.placement.target_names[0]
        exchange = DraftExchange.create(exchange_tensors(plan.draft), gpu)
    address = exchange.address if exchange else None
    workers = Workers(settings, folder, plan, rings.addresses, address, str(last or ""))
    evaluations = Evaluations(best)
    try:
        with Display(console, f"SplitServe  {settings.recipe}  {folder.path}") as display:
            return Coordinator(
                folder,
                feeder,
                evaluations,
                options,
                display,
                tracker,
                Engines(workers.engine, settings.layout.engines),
                None if settings.speculates else workers.evaluator,
                workers.trainers,
            ).run()
    finally:
        tracker.finish()
        rings.close()
        if exchange:
            exchange.close()


def best_so_far(folder: RunFolder) -> Best | None:
    """The best draft of the run's earlier life, if its snapshot is still there."""
    found = [
        Best(row["step"], accept_length_of(row["report"]), str(path))
        for row in folder.read_evals()
        if (path := folder.snapshots / f"step_{row['step']:06d}").is_dir()
    ]
    return max(found, key=lambda best: best.accept_length, default=None)


def _finish(
    settings: RunSettings, folder: RunFolder, plan: Plan, outcome: Outcome, console: Console
) -> None:
    """Export the best draft, check the export, and say what came out of the run."""
    best = best_so_far(folder)
    if best is None or outcome.final_report is None:
        raise RunFailed(f"no draft was measured; see {folder.logs}")
    export_draft(Path(best.path), folder.export)
    evals = folder.read_evals()
    first = next((e["report"]["reports"][0] for e in evals if e["step"] == 0), None)
    lines = serving_lines(folder.export, plan.target.path)
    print_summary(console, first, outcome.final_report, str(folder.export), lines)
    seconds = outcome.seconds
    folder.write_metrics(
        "finished",
        outcome.step,
        {
            "best_step": best.step,
            "accept_length_start": first["domains"]["all"]["accept_length"] if first else None,
            "accept_length_end": accept_length_of(outcome.final_report),
            **seconds,
        },
    )
    console.print(f"finished in {duration(seconds['total_seconds'])}", highlight=False)


def serving_lines(export: Path, target_path: str) -> tuple[str, ...]:
    """The commands that serve an export, or why there is none."""
    if not verify_export(export).servable:
        return ("(markov_rank=0 is plain DFlash: SGLang's DSPARK does not serve this draft)",)
    draft = str(export.resolve())
    chosen = ["splitserve", "serve", "profile=dspark_static"]
    return (
        " ".join(launch_command(draft, target_path)),
        "or, with the settings that are fastest on that machine:",
        shlex.join([*chosen, f"target={target_path}", f"draft={draft}"]),
    )


def export_draft(source: Path, target: Path) -> None:
    """Copy a draft in export format and verify the copy; an earlier export is replaced whole.

    Raises:
        ValueError: the copy is not a complete export, or cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
        verify_export(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ValueError(
            f"out: {target} cannot be written ({error.strerror or error}); free space or name "
            "another folder with out=FOLDER"
        ) from error
