"""Memory and pace of a run's data on conversations, for sources of several sizes.

Two parts for each size, each in a process of its own:

- `prepare`: what `splitserve train` does before its first process: hold out, render, mask, keep;
- `feed`: the same again, which finds the documents, and then the feeder with its ring over a number
  of steps, with the target's and the trainers' answers made up.

Memory is the largest sum over the part's processes of what is theirs alone and not the page cache's
(`Anonymous` of smaps_rollup; the ring's shared memory is not in it).
Writes `benchmarks/results/conversations.json` and prints the same object as its last line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.data_pipeline import write_rows
from benchmarks.parts import run_part

MODULE = "benchmarks.conversations"
BATCH = 256
STEPS = 400
RING_SAMPLES = 2048
IN_FLIGHT = 96


def write_token_rows(path: Path, count: int) -> None:
    """Write `count` rows of 32 to 60 tokens with two supervised spans, as JSON lines."""
    rng = random.Random(0)
    pool = rng.choices(range(100, 20_000), k=100_000)
    with open(path, "w") as file:
        for number in range(count):
            sizes = [8 + (number >> 3 * k) % 8 for k in range(4)]
            first = rng.randrange(len(pool) - 60)
            ids = pool[first : first + sum(sizes)]
            mask = [k % 2 for k, size in enumerate(sizes) for _ in range(size)]
            file.write(f'{{"id": "{number}", "input_ids": {ids}, "loss_mask": {mask}}}\n')


def part(options: argparse.Namespace) -> dict[str, float]:
    """Prepare the rows or find them; with `feed`, feed them."""
    from transformers import AutoTokenizer

    from splitserve.data.pipeline import PipelineSettings
    from splitserve.data.prepare import Preparation, prepare
    from splitserve.data.sources import SourceSettings

    tokenizer = AutoTokenizer.from_pretrained(options.target, local_files_only=True)
    wanted = Preparation(
        (SourceSettings(str(options.rows)),),
        PipelineSettings(max_tokens=2048, num_workers=options.workers),
        held_out_fraction=0.05,
    )
    began = time.monotonic()
    prepared = prepare(
        wanted, tokenizer, (), (), options.folder, lambda line: print(line, file=sys.stderr)
    )
    figures = {
        "seconds": time.monotonic() - began,
        "documents": len(prepared.store),
        "held_out": len(prepared.held_out),
    }
    if options.part == "feed":
        figures |= feed(prepared.store)
    return figures


def feed(store: object) -> dict[str, float]:
    """Every step of a run whose target and trainers answer at once."""
    from splitserve.data.schedule import SampleNames, SampleSchedule
    from splitserve.data.stored import StoredSamples
    from splitserve.messages import Taught, Teach
    from splitserve.run.feeder import Feeder
    from splitserve.transport.layout import RingLayout
    from splitserve.transport.rings import Rings

    layout = RingLayout(num_context_features=8, hidden_size=4, dtype="bfloat16")
    rings = Rings.create(RING_SAMPLES * layout.slot_bytes(100), layout, [()])
    stored = StoredSamples(store)  # type: ignore[arg-type]
    began = time.monotonic()
    feeder = Feeder(
        [],
        SampleSchedule(SampleNames((), stored), BATCH, STEPS, 0),
        rings,
        num_ranks=1,
        micro_batch_size=BATCH,
        max_in_flight=IN_FLIGHT,
        accept=lambda entry, output_ids: "not asked",
        stored=stored,
    )
    ready = time.monotonic() - began
    most = 0
    try:
        for step in range(STEPS):
            while feeder.batch(0, step) is None:
                for request in feeder.requests():
                    assert isinstance(request, Teach), request
                    feeder.taught(Taught(request.sample_id, request.slot))
                most = max(most, len(feeder.entries))
            feeder.step_done(0, step)
    finally:
        rings.close()
    seconds = time.monotonic() - began
    return {
        "feeder_ready_seconds": ready,
        "samples_per_s": BATCH * STEPS / seconds,
        "most_entries": most,
    }


def main() -> int:
    """Run both parts for every size, or one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", required=True, help="folder of the target, for its tokenizer")
    parser.add_argument("--num-rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--tokens", action="store_true", help="rows that come as tokens")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder; by default benchmarks/results")
    parser.add_argument("--part", choices=("prepare", "feed"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(part(options)))
        return 0
    from benchmarks.record import write_record

    figures: dict[str, object] = {"steps": STEPS, "batch": BATCH, "ring_samples": RING_SAMPLES}
    for count in options.num_rows:
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.jsonl"
            (write_token_rows if options.tokens else write_rows)(rows, count)
            given = ("--target", options.target, "--workers", str(options.workers))
            given = (*given, "--rows", str(rows), "--folder", f"{folder}/cache")
            for name in ("prepare", "feed"):
                found = run_part(MODULE, name, *given, kind="Anonymous:", every_seconds=0.2)
                figures |= {f"{name}_{key}_of_{count}": value for key, value in found.items()}
    sizes = " ".join(map(str, options.num_rows))
    command = (
        f"python -m {MODULE} --target {Path(options.target).name} --num-rows {sizes} "
        f"--workers {options.workers}" + " --tokens" * options.tokens
    )
    write_record("conversations", figures, command=command, folder=options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
