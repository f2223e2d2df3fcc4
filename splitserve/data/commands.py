"""`splitserve data preview|stats|generate`: look at data, measure it, have it answered."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from serving.split import allowed_splits, listed, uneven
from splitserve.data.account import DropReport
from splitserve.data.conversation import Conversation, parse_row
from splitserve.data.generate import GenerateCounts, Part, PartFile, generate
from splitserve.data.given import made, source_list
from splitserve.data.length import Document
from splitserve.data.pipeline import Pipeline, PipelineSettings
from splitserve.data.prepare import leak_index
from splitserve.data.preview import Shown, show_document, show_refusal, to_html, to_text
from splitserve.data.prompts import Prompt
from splitserve.data.refusal import RowRefused
from splitserve.data.render import ChatRenderer
from splitserve.data.sources import (
    RawRow,
    SourceSettings,
    fingerprint,
    mix,
    parse_json,
    read_rows,
)
from splitserve.data.stats import DataStats
from splitserve.data.store import open_or_build, store_key
from splitserve.errors import RunFailed, UserError, suggest
from splitserve.options import parse_options
from splitserve.settings import SamplingSettings
from splitserve.target.info import TargetInfo, check_window, read_target
from splitserve.target.prepare import default_cache_dir

WHOLE = 2**31 - 1
"""More tokens than any row has."""


@dataclass
class SourceOptions:
    """What every data command takes."""

    target: str = ""
    """HF folder of the target: its tokenizer and chat template are used."""
    data: Any = ""
    """A source, or a list such as [{path: a.jsonl, weight: 2}, {path: hf:NAME, domain: chat}]."""
    until: str = "all"
    """all reads every row; first stops where a source of several ends."""
    max_tokens: int = 2048
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None


@dataclass
class PreviewOptions(SourceOptions):
    """What `splitserve data preview` takes."""

    num: int = 5
    """Rows shown."""
    skip: int = 0
    """Rows passed over before."""
    last_answer_only: bool = False
    out: str = ""
    """HTML file to write; empty writes none."""


@dataclass
class StatsOptions(SourceOptions):
    """What `splitserve data stats` takes."""

    eval: str = ""
    """Eval prompts, a source: rows that hold one are dropped as eval_leak."""
    last_answer_only: bool = False
    max_drop_fraction: float = 0.5
    max_zero_mask_fraction: float = 0.05
    num_workers: int = 0
    num_anchors: int = 512
    """Blocks drawn per document in training, for the expected anchors."""
    cache: bool = True
    """Keep the documents for the next time."""
    cache_dir: str = ""
    """Empty is data/ in the user's cache folder."""
    out: str = ""
    """JSON file to write; empty writes none."""


@dataclass
class GenerateOptions(SourceOptions):
    """What `splitserve data generate` takes."""

    out: str = ""
    """Folder of the answers; the same folder goes on with what is missing."""
    sampling: Any = field(default_factory=list)
    """A list such as [{temperature: 0}, {temperature: 0.8, top_p: 0.95, max_new_tokens: 512}]."""
    part: str = "0/1"
    """K/N: work on part K of N; each part is worked on by one process."""
    seed: int = 0
    engine: str = "sglang"
    """sglang or transformers."""
    device: str = "cpu"
    dtype: str = "bfloat16"
    max_in_flight: int = 96
    max_running_requests: int = 64
    tp_size: int = 1
    num_threads: int = 0
    """CPU threads per engine rank; 0 takes all."""
    start_timeout_seconds: float = 600.0
    heartbeat_timeout_seconds: float = 300.0


def preview(arguments: Sequence[str]) -> int:
    """Show rendered rows with their supervised tokens in colour.

    Raises:
        UserError: unknown or ill-typed option, no such source or target.
    """
    options = parse_options(PreviewOptions, arguments, nested=True)
    if options.num < 1 or options.skip < 0:
        name, value = ("num", options.num) if options.num < 1 else ("skip", options.skip)
        raise UserError(name, value, "a number of rows", f"raise {name}")
    rows = mix(source_list(options.data, "data"), until=options.until)
    pipeline = _pipeline(options, last_answer_only=options.last_answer_only, max_tokens=WHOLE)
    shown = [
        _shown(pipeline, row, domain, options.max_tokens)
        for row, domain in itertools.islice(rows, options.skip, options.skip + options.num)
    ]
    if not shown:
        raise UserError("data", options.data, f"a source with more than {options.skip} rows", "")
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for one in shown:
        console.print(to_text(one))
    if options.out:
        heading = f"{len(shown)} rows for {Path(options.target).name}"
        _write(Path(options.out), to_html(shown, heading))
        console.print(f"page: {options.out}")
    return 0


def _shown(pipeline: Pipeline, row: RawRow, domain: str, max_tokens: int) -> Shown:
    outcome = pipeline.one(row, domain)
    if isinstance(outcome, Document):
        return show_document(outcome, max_tokens, pipeline.decode)
    return show_refusal(row.place, outcome, pipeline.decode)


def stats(arguments: Sequence[str]) -> int:
    """Measure lengths, supervised share, domains, duplicates and anchors; account for every row.

    Raises:
        UserError: unknown or ill-typed option, no such source or target.
        ValueError: a limit on dropped rows is passed.
    """
    options = parse_options(StatsOptions, arguments, nested=True)
    if options.num_anchors < 1:
        raise UserError("num_anchors", options.num_anchors, "1 or more", "raise num_anchors")
    sources = source_list(options.data, "data")
    pipeline = _pipeline(
        options,
        list(_eval_prompts(options.eval)) if options.eval else [],
        last_answer_only=options.last_answer_only,
        max_tokens=options.max_tokens,
        max_drop_fraction=options.max_drop_fraction,
        max_zero_mask_fraction=options.max_zero_mask_fraction,
        num_workers=options.num_workers,
    )
    gathered = DataStats(options.max_tokens, options.num_anchors)
    report = _documents_of(options, sources, pipeline, gathered.add)
    figures = {**report.to_dict(), "supervised_kept": report.supervised_kept, **gathered.to_dict()}
    if options.out:
        _write(Path(options.out), json.dumps(figures, indent=2) + "\n")
    _print_stats(figures)
    pipeline.check(report)
    return 0


def _documents_of(
    options: StatsOptions,
    sources: Sequence[SourceSettings],
    pipeline: Pipeline,
    take: Callable[[Document], None],
) -> DropReport:
    """Hand out every document, from the cache where it has them; returns the account."""
    rows = mix(sources, until=options.until)
    if not options.cache:
        for document in pipeline.documents(rows):
            take(document)
        return pipeline.report
    key = store_key(
        sources,
        pipeline.settings,
        pipeline.tokenizer,
        until=options.until,
        end_of_turn_ids=pipeline.end_of_turn_ids,
        eval_sources=[options.eval] if options.eval else [],
    )
    folder = Path(options.cache_dir) if options.cache_dir else default_cache_dir() / "data"
    store, found = open_or_build(folder, key, lambda: (pipeline.documents(rows), pipeline.report))
    print(f"documents {'found in' if found else 'kept in'} {store.folder}")
    for document in store:
        take(document)
    return store.report


def generate_responses(arguments: Sequence[str]) -> int:
    """Have the target answer prompts under several sampling settings, as training data.

    Raises:
        UserError: unknown or ill-typed option, no such source or target, or a folder of other
            answers.
        RunFailed: the target's process ended, or answers are missing.
    """
    options = parse_options(GenerateOptions, arguments, nested=True)
    if not options.out:
        raise UserError("out", "", "a folder for the answers", "set out=FOLDER")
    part = _part(options.part)
    settings = _sampling(options.sampling)
    sources = source_list(options.data, "data")
    # Imported here: preview and stats need no torch.
    from splitserve.target.weights import check_weights

    target, tokenizer = _target(options.target)
    check_weights(target)
    most = options.max_tokens
    check_window(target, "max_tokens", most, most, "lower max_tokens")
    if options.tp_size < 1:
        raise UserError("tp_size", options.tp_size, "1 or more", "raise tp_size")
    if options.device != "cpu" and (bad := uneven(target.config, options.tp_size)):
        raise UserError(
            "tp_size",
            options.tp_size,
            f"{listed(allowed_splits(target.config))}, by which {' and '.join(bad)} of "
            f"{target.architecture} can be divided",
            "choose one of these",
        )
    renderer = ChatRenderer(tokenizer, options.chat_template_kwargs, options.system_prompt)
    description = {
        "target": Path(target.path).name,
        "dtype": options.dtype,
        "data": [[fingerprint(s.path) or s.path, s.domain] for s in sources],
        "sampling": [asdict(s) for s in settings],
        "max_tokens": options.max_tokens,
        "chat_template_kwargs": options.chat_template_kwargs,
        "system_prompt": options.system_prompt,
        "seed": options.seed,
    }
    out = PartFile(Path(options.out), part, description)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{part.name}: {len(out)} found in {options.out}")
    try:
        counts = _generate(options, out, part, settings, sources, target, renderer, console)
    finally:
        out.close()
    console.print(
        f"{part.name}: {counts.found} found, {counts.written} written ({counts.tokens} tokens, "
        f"ended by {_listed(counts.finished)}), dropped {_listed(counts.dropped)}"
    )
    if counts.failed:
        raise RunFailed(f"{counts.failed} answers failed; start again to try them once more")
    return 0


def _generate(
    options: GenerateOptions,
    out: PartFile,
    part: Part,
    settings: Sequence[SamplingSettings],
    sources: Sequence[SourceSettings],
    target: TargetInfo,
    renderer: ChatRenderer,
    console: Console,
) -> GenerateCounts:
    # Imported here: preview and stats need neither torch nor a worker.
    from splitserve.engine.base import SPARE_TOKENS, EngineSpec
    from splitserve.run.process import ChildProcess
    from splitserve.transport.layout import RingLayout
    from splitserve.transport.ring import RingOwner

    # Nothing is captured; the engine wants a ring and a layer all the same.
    layout = RingLayout(target.hidden_size, target.hidden_size, options.dtype)
    ring = RingOwner.create(layout.slot_bytes(options.max_tokens), layout)
    log = Path(options.out) / f"{part.name}.log"
    spec = EngineSpec(
        target_path=target.path,
        layer_ids=(0,),
        ring=ring.address,
        kind=options.engine,
        dtype=options.dtype,
        device=options.device,
        eos_token_ids=target.eos_token_ids,
        context_length=options.max_tokens + SPARE_TOKENS,
        kv_cache_tokens=options.max_running_requests * (options.max_tokens + SPARE_TOKENS),
        max_running_requests=options.max_running_requests,
        tp_size=options.tp_size,
        num_threads=options.num_threads,
        log_file=str(log),
        selfcheck=False,
        start_timeout_seconds=options.start_timeout_seconds,
    )
    engine = ChildProcess("engine", f"engine-{part.number}", spec, log, _ENVIRONMENT)
    told = 0

    def progress(counts: GenerateCounts) -> None:
        nonlocal told
        if counts.written >= told + _TOLD_EVERY:
            told = counts.written
            console.print(f"{part.name}: {counts.written} written, {counts.tokens} tokens")

    try:
        return generate(
            mix(sources, until=options.until),
            renderer,
            settings,
            engine,
            out,
            part,
            max_tokens=options.max_tokens,
            end_of_turn_ids=target.eos_token_ids,
            seed=options.seed,
            max_in_flight=options.max_in_flight,
            start_timeout_seconds=options.start_timeout_seconds,
            heartbeat_timeout_seconds=options.heartbeat_timeout_seconds,
            progress=progress,
        )
    finally:
        engine.close()
        ring.close()


_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
_TOLD_EVERY = 500

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "preview": preview,
    "stats": stats,
    "generate": generate_responses,
}


def run(arguments: Sequence[str]) -> int:
    """One command of the group: its name, then its options.

    Raises:
        UserError: no such command, and what the command raises.
    """
    name, *rest = arguments or ("",)
    if name not in COMMANDS:
        raise UserError("data command", name, ", ".join(COMMANDS), suggest(name, COMMANDS))
    return COMMANDS[name](rest)


# --- options -------------------------------------------------------------------------------------


def _sampling(sampling: Any) -> list[SamplingSettings]:
    if not isinstance(sampling, list) or not sampling:
        raise UserError(
            "sampling",
            sampling,
            "a list of one setting or more",
            'write for example "sampling=[{temperature: 0.0}, {temperature: 0.8}]"',
        )
    return [made("sampling", SamplingSettings, setting) for setting in sampling]


def _part(text: str) -> Part:
    number, slash, count = text.partition("/")
    if not (slash and number.isdigit() and count.isdigit()):
        raise UserError("part", text, "K/N with 0 <= K < N", "such as part=0/4")
    return Part(int(number), int(count))


def _target(path: str) -> tuple[TargetInfo, Any]:
    if not path:
        raise UserError("target", path, "the folder of a Hugging Face model", "set target=FOLDER")
    from transformers import AutoTokenizer

    target = read_target(path)
    return target, AutoTokenizer.from_pretrained(target.path, local_files_only=True)


def _pipeline(
    options: SourceOptions, eval_prompts: Sequence[Prompt] = (), **settings: Any
) -> Pipeline:
    made = PipelineSettings(
        chat_template_kwargs=options.chat_template_kwargs,
        system_prompt=options.system_prompt,
        **settings,
    )
    target, tokenizer = _target(options.target)
    renderer = ChatRenderer(tokenizer, options.chat_template_kwargs, options.system_prompt)
    return Pipeline(tokenizer, made, target.eos_token_ids, leak_index(eval_prompts, renderer))


def _eval_prompts(path: str) -> Iterator[Prompt]:
    """Eval prompts; a bad one stops, since what it would have found would go unseen."""
    for raw in read_rows(path, "eval"):
        try:
            row = parse_row(parse_json(raw), raw.place, "general")
        except RowRefused as refused:
            raise UserError(
                "eval", f"{path}, {raw.place}", "rows of messages or prompts", refused.detail
            ) from refused
        if not isinstance(row, Conversation):
            raise UserError(
                "eval", f"{path}, {raw.place}", "rows of messages or prompts", "give text, not ids"
            )
        yield Prompt(row.id, row.domain, row.messages, row.tools)


# --- output --------------------------------------------------------------------------------------


def _print_stats(figures: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False)
    table = Table(show_header=False, box=None)
    for name in (
        "rows", "used", "truncated", "documents", "tokens", "supervised_tokens",
        "supervised_share", "supervised_kept", "duplicate_documents", "duplicate_prompts",
        "anchor_places", "expected_anchors", "expected_anchors_per_document",
    ):  # fmt: skip
        value = figures[name]
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        table.add_row(name.replace("_", " "), shown)
    table.add_row("length quantiles", _listed(figures["length_quantiles"]))
    table.add_row("length buckets, up to", _listed(figures["length_buckets"]))
    for name, domain in figures["domains"].items():
        table.add_row(f"domain {name}", _listed(domain))
    for reason, number in figures["dropped"].items():
        example = figures["examples"][reason]
        detail = f"{number:,}, such as {example['sample_id']}: {example['detail']}"
        table.add_row(f"dropped as {reason}", detail)
    console.print(table)


def _listed(values: Any) -> str:
    return ", ".join(f"{k.replace('_', ' ')} {v:,}" for k, v in values.items()) or "none"


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
    except OSError as error:
        raise UserError(
            "out", str(path), "a file that can be written", f"{error.strerror}"
        ) from error
