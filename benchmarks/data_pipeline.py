"""Times the data pipeline on synthetic conversations, beside a plain `datasets.map`.

Three parts, each in a process of its own so that its memory is its own:

- the pipeline, from JSON lines to a finished store on disk (parsing, rendering, masks, lengths,
  accounting, digests);
- `datasets.map` with `apply_chat_template` alone, which gives ids and no mask; only the map is
  timed, not the loading before it;
- one conversation of 64 turns and 16,384 tokens or a little more, rendered, tokenized and masked.

On a machine that others use as well, rows per second of processor time say more than rows per
second; both are recorded. Memory is the largest sum over the part's processes of what they hold
(proportional set size).
Writes `benchmarks/results/data_pipeline.json` and prints the same object as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.parts import run_part

TEXT = """the river runs past an old mill and under two bridges before it meets another one near
a small town where people sell bread fish and paper every Monday morning at seven"""
WORDS = TEXT.split()
MODULE = "benchmarks.data_pipeline"
NUM_TURNS = 64
NUM_TOKENS = 16_384
REPEATS = 25


def synthetic_row(number: int) -> dict[str, Any]:
    """A conversation of one or two questions and answers; the same for the same number."""
    rng = random.Random(number)
    messages = []
    for _ in range(rng.randint(1, 2)):
        for role, most in (("user", 12), ("assistant", 24)):
            words = rng.choices(WORDS, k=rng.randint(3, most))
            messages.append({"role": role, "content": f"{' '.join(words)} {number}."})
    return {"id": str(number), "messages": messages}


def write_rows(path: Path, count: int) -> None:
    """Write `count` synthetic rows as JSON lines."""
    with open(path, "w") as file:
        for number in range(count):
            file.write(json.dumps(synthetic_row(number)) + "\n")


def processor_seconds() -> float:
    """Of this process and of those below it that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def part_pipeline(options: argparse.Namespace) -> dict[str, float]:
    """From JSON lines to a store."""
    from splitserve.data.pipeline import Pipeline, PipelineSettings
    from splitserve.data.sources import SourceSettings, mix
    from splitserve.data.store import open_or_build

    settings = PipelineSettings(max_tokens=2048, num_workers=options.workers)
    start = time.monotonic()
    pipeline = Pipeline(_tokenizer(options.target), settings)
    rows = mix([SourceSettings(str(options.rows))])
    store, _ = open_or_build(
        options.folder, "", lambda: (pipeline.documents(rows), pipeline.report)
    )
    seconds, processor = time.monotonic() - start, processor_seconds()
    assert pipeline.report.num_rows == len(store), pipeline.report.to_dict()
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "rows": len(store),
        "tokens": pipeline.report.num_tokens,
        "supervised_tokens": pipeline.report.num_supervised,
    }


def part_map(options: argparse.Namespace) -> dict[str, float]:
    """The template and the tokenizer through `datasets.map`."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = _tokenizer(options.target)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": tokenizer.apply_chat_template(row["messages"], return_dict=False)}

    loaded = datasets.load_dataset(
        "json", data_files=str(options.rows), split="train", cache_dir=str(options.folder)
    )
    start, before = time.monotonic(), processor_seconds()
    mapped = loaded.map(encode, num_proc=options.workers, remove_columns=loaded.column_names)
    return {
        "seconds": time.monotonic() - start,
        "processor_seconds": processor_seconds() - before,
        "rows": len(mapped),
    }


def part_mask(options: argparse.Namespace) -> dict[str, float]:
    """One long conversation, again and again."""
    from splitserve.data.render import ChatRenderer

    tokenizer = _tokenizer(options.target)
    renderer = ChatRenderer(tokenizer)
    rng = random.Random(0)
    messages: list[dict[str, str]] = []
    size = 200
    while True:
        messages = [
            {"role": role, "content": " ".join(rng.choices(WORDS, k=size))}
            for _ in range(NUM_TURNS // 2)
            for role in ("user", "assistant")
        ]
        rendered = renderer.render_conversation(messages)
        if len(rendered.token_ids) >= NUM_TOKENS:
            break
        size += 4
    text = tokenizer.apply_chat_template(messages, tokenize=False)

    def times(work: Callable[[], object]) -> Iterator[float]:
        for _ in range(REPEATS):
            start = time.perf_counter()
            work()
            yield time.perf_counter() - start

    whole = sorted(times(lambda: renderer.render_conversation(messages)))
    plain = sorted(times(lambda: tokenizer(text, add_special_tokens=False)["input_ids"]))
    marks = sorted(times(lambda: renderer.render_text(messages)))
    return {
        "mask_seconds_16k_64_turns": statistics.median(whole),
        "mask_p20_seconds_16k_64_turns": whole[REPEATS // 5],
        "mask_p80_seconds_16k_64_turns": whole[4 * REPEATS // 5],
        "mask_tokens": len(rendered.token_ids),
        "tokenizer_alone_seconds_16k_64_turns": statistics.median(plain),
        "render_and_trace_seconds_16k_64_turns": statistics.median(marks),
    }


def _tokenizer(target: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target, local_files_only=True)


def main() -> int:
    """Run the parts, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", required=True, help="folder of the target, for its tokenizer")
    parser.add_argument("--num-rows", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="folder; by default benchmarks/results")
    parser.add_argument(
        "--mask-only", action="store_true", help="keep the record's other figures as they are"
    )
    parser.add_argument("--part", choices=("pipeline", "map", "mask"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part = {"pipeline": part_pipeline, "map": part_map, "mask": part_mask}[options.part]
        print(json.dumps(part(options)))
        return 0
    from benchmarks.record import RESULTS, write_record

    command = (
        f"python -m {MODULE} --target {Path(options.target).name} "
        f"--num-rows {options.num_rows} --workers {options.workers}"
    )
    if options.mask_only:
        path = (options.out or RESULTS) / "data_pipeline.json"
        record = json.loads(path.read_text())
        mask = run_part(MODULE, "mask", "--target", options.target)
        del mask["peak_memory_gb"]
        command = f"{record['command']}; then with --mask-only"
        figures = {**record["figures"], **mask}
        write_record("data_pipeline", figures, command=command, folder=options.out)
        return 0
    common = ("--target", options.target, "--workers", str(options.workers))
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        write_rows(rows, options.num_rows)
        size = rows.stat().st_size
        given = (*common, "--rows", str(rows))
        mask = run_part(MODULE, "mask", *common)
        pipeline = run_part(MODULE, "pipeline", *given, "--folder", f"{folder}/store")
        mapped = run_part(MODULE, "map", *given, "--folder", f"{folder}/map")
    del mask["peak_memory_gb"]
    figures = {
        "rows_per_s": pipeline["rows"] / pipeline["seconds"],
        "map_rows_per_s": mapped["rows"] / mapped["seconds"],
        "rows_per_processor_s": pipeline["rows"] / pipeline["processor_seconds"],
        "map_rows_per_processor_s": mapped["rows"] / mapped["processor_seconds"],
        "peak_memory_gb": pipeline["peak_memory_gb"],
        "map_peak_memory_gb": mapped["peak_memory_gb"],
        **mask,
        "rows": pipeline["rows"],
        "workers": options.workers,
        "rows_file_gb": size / 1e9,
        "tokens_per_row": pipeline["tokens"] / pipeline["rows"],
        "supervised_share": pipeline["supervised_tokens"] / pipeline["tokens"],
        "load_average_15_minutes": os.getloadavg()[2],
    }
    write_record("data_pipeline", figures, command=command, folder=options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
