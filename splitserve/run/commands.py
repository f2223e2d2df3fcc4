"""`splitserve eval` and `splitserve export`: on a run folder, or on a draft folder of one's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from dspark.checkpoint import CONFIG_NAME, WEIGHTS_NAME, read_config
from splitserve.compose import compose_resumed
from splitserve.data.prompts import read_prompts
from splitserve.data.render import ChatRenderer
from splitserve.errors import RunFailed, UserError
from splitserve.eval.measure import Evaluator, lossless_differences
from splitserve.eval.spec import EvalPrompt, EvaluatorSpec
from splitserve.options import parse_options
from splitserve.run.folder import RunFolder, newest_run
from splitserve.run.main import best_so_far, export_draft, serving_lines
from splitserve.run.plan import evaluator_spec, load_tokenizer, make_plan
from splitserve.run.summary import accept_table, settings_line
from splitserve.target.info import check_window
from splitserve.target.prepare import TargetInfo, read_target
from splitserve.target.weights import check_weights
from splitserve.train.checkpoint import list_checkpoints, read_meta


@dataclass(frozen=True)
class EvalOptions:
    """What `splitserve eval` takes."""

    run: str = ""
    """Run folder; empty takes the newest below runs/."""
    draft: str = ""
    """Draft folder; empty takes the run's export."""
    target: str = ""
    """With `draft` and without `run`: the target's HF folder."""
    prompts: str = ""
    """With `draft` and without `run`: JSON-lines file of prompts."""
    temperature: float = 0.0
    num_prompts: int = 0
    """0 uses all."""
    max_new_tokens: int = 0
    """0 takes the run's, or 64."""
    lossless: bool = False
    """Compare greedy output with the draft and without it instead of measuring."""


@dataclass(frozen=True)
class ExportOptions:
    """What `splitserve export` takes."""

    run: str = ""
    """Run folder; empty takes the newest below runs/."""
    checkpoint: str = "best"
    """best, last, or the number of a step that has a checkpoint."""
    out: str = ""
    """Folder to write; empty is export/ in the run folder."""


def evaluate(arguments: Sequence[str]) -> int:
    """Measure a draft's accept length, or check that it changes no greedy output.

    Raises:
        UserError: unknown or ill-typed option, or nothing to measure.
        RunFailed: with lossless=true, an output differs.
    """
    options = parse_options(EvalOptions, arguments)
    console = Console()
    _check_eval(options)
    spec, draft = _eval_spec(options)
    if options.num_prompts:
        spec = replace(spec, prompts=spec.prompts[: options.num_prompts])
    if options.lossless:
        differences = lossless_differences(spec, draft, spec.prompts)
        for item in differences:
            console.print(
                f"{item.prompt_id}: token {item.place} is {item.with_draft} with the draft, "
                f"{item.without_draft} without"
            )
        if differences:
            raise RunFailed(f"{len(differences)} of {len(spec.prompts)} greedy outputs differ")
        console.print(f"lossless: {len(spec.prompts)} greedy outputs are equal, token by token")
        return 0
    report = Evaluator(spec).measure(draft, -1, full=False)["reports"][0]
    report["settings"]["draft_step"] = draft
    console.print(accept_table(None, report))
    console.print(settings_line(report), soft_wrap=True)
    return 0


def _check_eval(options: EvalOptions) -> None:
    if not 0.0 <= options.temperature < math.inf:
        raise UserError("temperature", options.temperature, "0 or more", "0 is greedy")
    if options.lossless and options.temperature > 0.0:
        raise UserError(
            "temperature", options.temperature, "0 with lossless=true", "leave one of them out"
        )
    for name in ("num_prompts", "max_new_tokens"):
        if getattr(options, name) < 0:
            raise UserError(name, getattr(options, name), "0 or more", f"leave {name} out")
    for name in ("target", "prompts"):
        # A run is measured with its own; taking no notice would give a figure for another pair.
        if getattr(options, name) and (options.run or not options.draft):
            raise UserError(
                name,
                getattr(options, name),
                "nothing, but with draft=FOLDER and without run=",
                f"leave {name} out, or name the draft's folder with draft= and leave run= out",
            )


def _eval_spec(options: EvalOptions) -> tuple[EvaluatorSpec, str]:
    if options.draft and not options.run:
        return _spec_of_folders(options), options.draft
    folder = RunFolder(_run_path(options.run))
    settings = compose_resumed(folder.config, [])
    plan = make_plan(replace(settings, resume=True))
    spec = evaluator_spec(settings, plan)
    spec = replace(
        spec,
        temperatures=(options.temperature,),
        max_new_tokens=options.max_new_tokens or spec.max_new_tokens,
    )
    _check_lengths(plan.target, spec)
    return spec, options.draft or str(_existing(folder.export))


def _check_lengths(target: TargetInfo, spec: EvaluatorSpec) -> None:
    new = spec.max_new_tokens
    longest = max((len(prompt.token_ids) for prompt in spec.prompts), default=0) + new
    check_window(target, "max_new_tokens", new, longest, "lower max_new_tokens, or leave it out")


def _spec_of_folders(options: EvalOptions) -> EvaluatorSpec:
    for name in ("target", "prompts"):
        if not getattr(options, name):
            raise UserError(name, "", "a path, with draft=FOLDER", f"add {name}=PATH or run=FOLDER")
    target = read_target(options.target)
    check_weights(target)
    renderer = ChatRenderer(load_tokenizer(target.path))
    prompts = tuple(
        EvalPrompt(p.id, p.domain, renderer.prompt_ids(p.messages))
        for p in read_prompts(options.prompts)
    )
    spec = EvaluatorSpec(
        target_path=target.path,
        dtype="bfloat16",
        prompts=prompts,
        eos_token_ids=target.eos_token_ids,
        max_new_tokens=options.max_new_tokens or 64,
        batch_size=32,
        temperatures=(options.temperature,),
        final_temperatures=(),
        seed=0,
        num_threads=2,
    )
    _check_lengths(target, spec)
    return spec


def export(arguments: Sequence[str]) -> int:
    """Write a draft of a run as the folder that SGLang loads, verified.

    Raises:
        UserError: unknown option, run or checkpoint.
    """
    options = parse_options(ExportOptions, arguments)
    folder = RunFolder(_run_path(options.run))
    source = _checkpoint_draft(folder, options.checkpoint)
    out = Path(options.out) if options.out else folder.export
    if source.resolve() != out.resolve():
        if out.resolve() != folder.export.resolve():
            _refuse_other_files(out)
        export_draft(source, out)
    target = compose_resumed(folder.config, []).target
    console = Console()
    console.print(f"export: {out}", soft_wrap=True)
    for line in serving_lines(out, target.path or "TARGET_FOLDER"):
        console.print(f"  {line}", soft_wrap=True, highlight=False)
    return 0


def _refuse_other_files(out: Path) -> None:
    """An export takes a folder's place whole: one that is more than an export is not to go."""
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    others = [name for name in names if name not in (CONFIG_NAME, WEIGHTS_NAME)]
    if others:
        raise UserError(
            "out",
            str(out),
            f"a new folder, or one with {CONFIG_NAME} and {WEIGHTS_NAME} only, which is replaced; "
            f"it holds {', '.join(others[:3])}{' ...' if len(others) > 3 else ''}",
            "name another folder with out=FOLDER",
        )


def _checkpoint_draft(folder: RunFolder, name: str) -> Path:
    checkpoints = {int(read_meta(p)["step"]): p for p in list_checkpoints(folder.checkpoints)}
    if name == "best":
        best = best_so_far(folder)
        if best is None:
            raise UserError(
                "checkpoint", name, "a run with a measured draft", "use checkpoint=last"
            )
        return Path(best.path)
    if name == "last" and checkpoints:
        return checkpoints[max(checkpoints)] / "draft"
    if name.isdigit() and int(name) in checkpoints:
        return checkpoints[int(name)] / "draft"
    have = ", ".join(map(str, sorted(checkpoints))) or "none yet"
    raise UserError(
        "checkpoint", name, f"best, last or a step with a checkpoint ({have})", "choose one"
    )


def _run_path(run: str) -> Path:
    if not run:
        runs = [newest_run(p) for p in Path("runs").glob("*") if any(p.glob("*/config.yaml"))]
        if not runs:
            raise UserError("run", "", "a run folder", "there is none below runs/; name one")
        return max(runs, key=lambda p: (p / "config.yaml").stat().st_mtime)
    path = Path(run)
    if not (path / "config.yaml").is_file():
        raise UserError("run", run, "the folder of a run, with config.yaml in it", "check the path")
    return path


def _existing(path: Path) -> Path:
    if not path.is_dir():
        raise UserError(
            "draft", str(path), "an exported draft", "run splitserve export first, or name draft="
        )
    read_config(path)
    return path
