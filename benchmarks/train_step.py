"""The training step on one GPU: time, memory and share of the chip's matrix rate.

    python -m benchmarks.train_step --geometry 8b --deepspec FOLDER   # beside DeepSpec
    python -m benchmarks.train_step --long                            # 32k and 131k tokens

Forward and backward of one micro-batch, on random bfloat16 data, median of the steps. FOLDER is a
checkout of github.com/deepseek-ai/DeepSpec, which then runs in the same process on the same
shapes, compiled for them: its own dynamic=True does not compile with torch 2.11. Writes
`benchmarks/results/train_step_NAME.json`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import positive
from benchmarks.record import write_record
from dspark.attention import ContextBounds, attend
from dspark.batch import TrainingBatch, TrainingSample, batch_denominators, lay_out
from dspark.config import DraftConfig
from dspark.flops import StepSize, necessary_flops
from dspark.model import DSparkDraft
from dspark.objective import ObjectiveConfig, fused_objective
from dspark.training import DraftWithLoss
from splitserve.settings import TrainSettings
from splitserve.train.optimizer import init_process_group, initialise_engine

MATMUL_SIDE = 8192
OPTIMIZER_ROUNDS = 8
"""Windows of passes alone, and as many whole steps."""
LONG_SHAPES = ((32_768, 512), (131_072, 512), (131_072, 2048), (32_768, 2048))


@dataclass(frozen=True)
class Geometry:
    """A draft with five layers that reads five layers of a target of these sizes."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    layer_ids: tuple[int, ...]

    def draft(self, block_size: int) -> DraftConfig:
        return DraftConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=5,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            max_position_embeddings=262_144,
            block_size=block_size,
            target_layer_ids=self.layer_ids,
            num_target_layers=self.num_target_layers,
            mask_token_id=self.vocab_size - 1,
            markov_rank=256,
        )


GEOMETRIES = {
    "8b": Geometry(4096, 12288, 32, 8, 128, 151_936, 36, (1, 9, 17, 25, 33)),
    "4b": Geometry(2560, 9728, 32, 8, 128, 151_936, 36, (1, 9, 17, 25, 33)),
    # For a look at the script itself where there is no large GPU.
    "tiny": Geometry(256, 512, 4, 2, 64, 8192, 12, (1, 3, 5, 7, 9)),
}


@dataclass(frozen=True)
class Shape:
    tokens: int
    anchors: int
    block: int


# --- what is measured -----------------------------------------------------------------------------


def build(geometry: Geometry, shape: Shape, objective: ObjectiveConfig) -> DraftWithLoss:
    torch.manual_seed(0)
    config = geometry.draft(shape.block)
    with torch.device("cuda"):
        draft = DSparkDraft(config).bfloat16()
        embedding = torch.randn(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
        lm_head = torch.randn_like(embedding) * config.hidden_size**-0.5
        torch.nn.init.normal_(draft.markov_head.markov_w2.weight, std=0.02)
    return DraftWithLoss(draft, embedding, lm_head, objective).cuda()


def random_batch(geometry: Geometry, shape: Shape, seed: int) -> TrainingBatch:
    config = geometry.draft(shape.block)
    g = torch.Generator("cuda").manual_seed(seed)

    def noise(width: int) -> torch.Tensor:
        return torch.randn(shape.tokens, width, generator=g, device="cuda", dtype=torch.bfloat16)

    sample = TrainingSample(
        sample_id=str(seed),
        epoch=0,
        token_ids_S=torch.randint(
            config.vocab_size, (shape.tokens,), generator=torch.Generator().manual_seed(seed)
        ),
        loss_mask_S=torch.ones(shape.tokens, dtype=torch.bool),
    )
    layout = lay_out(
        [sample],
        num_anchors=shape.anchors,
        block_size=shape.block,
        seed=seed,
        row_tokens=shape.tokens,
    )
    widths = config.num_context_features, config.hidden_size
    into = layout.empty_states(*widths, torch.bfloat16, "cuda")
    return layout.with_states([(noise(widths[0]), noise(widths[1]))], into)


def num_targets(batch: TrainingBatch) -> int:
    """Positions at which the target's distribution is needed."""
    return int(batch.target_bounds_M2.max())


def step_of(model: DraftWithLoss, batches: list[TrainingBatch]) -> Callable[[int], None]:
    scales = [[1.0 / float(d) for d in batch_denominators(b, model.config)] for b in batches]

    def step(index: int) -> None:
        place = index % len(batches)
        model(batches[place], *scales[place]).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def time_ms(step: Callable[[int], None], steps: int, warmup: int = 3) -> tuple[float, float]:
    """Median milliseconds of a step and the spread between its 10th and 90th percentile."""
    for index in range(warmup):
        step(index)
    return in_turn((step,), steps, warmup=0)[0]


def in_turn(
    steps: Sequence[Callable[[int], None]], rounds: int, warmup: int = 1
) -> list[tuple[float, float]]:
    """`time_ms` of several that take turns."""
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in steps]
    for index in range(-warmup, rounds):
        for step, own in zip(steps, marks, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step(index + warmup)
            end.record()
            if index >= 0:
                own.append((start, end))
    torch.cuda.synchronize()
    found = []
    for own in marks:
        elapsed = sorted(start.elapsed_time(end) for start, end in own)
        spread = elapsed[int(0.9 * rounds)] - elapsed[int(0.1 * rounds)]
        found.append((statistics.median(elapsed), spread))
    return found


def matmul_tflops() -> float:
    """Rate of a square bfloat16 product of random data."""
    a, b = (
        torch.randn(MATMUL_SIDE, MATMUL_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    ms, _ = time_ms(lambda _: torch.mm(a, b), 30)
    return 2 * MATMUL_SIDE**3 / ms / 1e9


def measured(step: Callable[[int], None], steps: int) -> tuple[float, float, float]:
    """Median and spread in milliseconds, peak memory in GB, everything allocated included."""
    for index in range(3):
        step(index)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    ms, spread = time_ms(step, steps, warmup=1)
    return ms, spread, torch.cuda.max_memory_allocated() / 1e9


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def ours(
    geometry: Geometry, shape: Shape, objective: ObjectiveConfig, steps: int
) -> dict[str, float]:
    model = build(geometry, shape, objective)
    batches = [random_batch(geometry, shape, seed) for seed in range(3)]
    unique = statistics.mean(map(num_targets, batches))
    step = step_of(model, batches)
    ms, spread, peak = measured(step, steps)
    rows = shape.anchors * shape.block
    # On average half of the context is seen.
    pairs = rows * (shape.tokens // 2 + shape.block)
    size = StepSize(shape.tokens, rows, pairs, int(unique))
    flops = necessary_flops(geometry.draft(shape.block), size)
    return {
        "step_ms": ms,
        "step_spread_ms": spread,
        "peak_memory_gb": peak,
        "necessary_tflop": sum(flops.values()) / 1e12,
        "unique_target_positions": unique,
        **{f"necessary_{name}_tflop": value / 1e12 for name, value in flops.items()},
    }


def join_alone() -> None:
    """A process group of this process, for what reduces over ranks."""
    if not torch.distributed.is_initialized():
        init_process_group("cuda:0", rank=0, world_size=1, master_port=29534, timeout_seconds=60.0)


def deepspec(folder: Path, geometry: Geometry, shape: Shape, steps: int) -> dict[str, float]:
    """DeepSpec's own model and loss, compiled as its trainer does."""
    sys.path.insert(0, str(folder))
    from deepspec.modeling.dspark.loss import compute_dspark_loss
    from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel
    from deepspec.modeling.dspark.qwen3.config import build_draft_config
    from deepspec.utils import metrics
    from transformers import Qwen3Config

    join_alone()
    draft = geometry.draft(shape.block)
    target = Qwen3Config(
        hidden_size=draft.hidden_size,
        intermediate_size=draft.intermediate_size,
        num_hidden_layers=geometry.num_target_layers,
        num_attention_heads=draft.num_attention_heads,
        num_key_value_heads=draft.num_key_value_heads,
        head_dim=draft.head_dim,
        vocab_size=draft.vocab_size,
        rms_norm_eps=draft.rms_norm_eps,
        max_position_embeddings=draft.max_position_embeddings,
    )
    config = build_draft_config(
        target,
        Namespace(
            num_draft_layers=draft.num_hidden_layers,
            target_layer_ids=list(draft.target_layer_ids),
            confidence_head_alpha=1.0,
            confidence_head_with_markov=True,
            markov_rank=draft.markov_rank,
            markov_head_type="vanilla",
            block_size=shape.block,
            mask_token_id=draft.mask_token_id,
            num_anchors=shape.anchors,
        ),
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3DSparkModel(config).bfloat16()
    model.set_embedding_head_trainable(False)
    compiled = torch.compile(model, dynamic=False)
    inputs = [random_batch(geometry, shape, seed) for seed in range(3)]
    loss_mask = torch.ones(1, shape.tokens, device="cuda")

    def step(index: int) -> None:
        batch = inputs[index % len(inputs)]
        outputs = compiled(
            input_ids=batch.token_ids_BS,
            target_hidden_states=batch.features_BSF,
            loss_mask=loss_mask,
            target_last_hidden_states=batch.target_states_BSD,
        )
        compute_dspark_loss(
            outputs=outputs,
            loss_decay_gamma=4.0,
            ce_loss_alpha=0.1,
            l1_loss_alpha=0.9,
            confidence_head_alpha=1.0,
        ).backward()
        metrics.reset()
        model.zero_grad(set_to_none=True)

    ms, spread, peak = measured(step, steps)
    return {
        "deepspec_step_ms": ms,
        "deepspec_step_spread_ms": spread,
        "deepspec_peak_memory_gb": peak,
    }


# --- parts ----------------------------------------------------------------------------------------


def print_kernels(step: Callable[[int], None]) -> None:
    """The GPU's time in a step, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    for index in range(3):
        step(index)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for index in range(3):
            step(index)
        torch.cuda.synchronize()
    kernels = [e for e in trace.key_averages() if e.self_device_time_total]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in kernels)
    print(f"kernels: {total / 3e3:.2f} ms a step")
    for event in kernels[:45]:
        ms, count = event.self_device_time_total / 3e3, event.count // 3
        print(f"{ms:8.3f} ms  {count:4d}x  {event.key[:150]}")


def part_times(geometry: Geometry, shape: Shape, objective: ObjectiveConfig) -> dict[str, float]:
    """Each part alone, forward and backward, on the step's shapes."""
    config = geometry.draft(shape.block)
    batch = random_batch(geometry, shape, 0)
    rows, width = shape.anchors * shape.block, config.hidden_size

    def random(*sizes: int, grad: bool = True) -> torch.Tensor:
        values = torch.randn(sizes, device="cuda", dtype=torch.bfloat16) * sizes[-1] ** -0.5
        return values.requires_grad_(grad)

    def products(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Callable[[int], None]:
        outs = [torch.randn_like(x @ w.t()) for x, w in pairs]

        def run(_: int) -> None:
            for (x, w), out in zip(pairs, outs, strict=True):
                (x @ w.t()).backward(out)
                x.grad = w.grad = None

        return run

    found: dict[str, float] = {}

    def record(name: str, step: Callable[[int], None], times: int = 1) -> None:
        found[f"part_{name}_ms"] = times * time_ms(step, 10)[0]
        free()

    record("fc", products((batch.features_BSF[0], random(width, config.num_context_features))))
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    dim, layers = config.head_dim, config.num_hidden_layers
    context, x = random(shape.tokens, width), random(rows, width)
    record("context_kv", products(*((context, random(kv * dim, width)) for _ in range(2))), layers)
    inner = random(rows, config.intermediate_size)
    sizes = (heads * dim, kv * dim, kv * dim, config.intermediate_size, config.intermediate_size)
    record(
        "layer_products",
        products(
            *((x, random(out, width)) for out in sizes),
            (random(rows, heads * dim), random(width, heads * dim)),
            (inner, random(width, config.intermediate_size)),
        ),
        layers,
    )
    # As the model makes them: the heads of a position side by side.
    lengths = (rows, heads), *((n, kv) for n in (shape.tokens, shape.tokens, rows, rows))
    leaves = [random(1, length, num_heads, dim) for length, num_heads in lengths]
    bounds = ContextBounds(batch.context_start_BA, batch.anchors_BA)
    upstream = torch.randn_like(leaves[0]).transpose(1, 2)

    def attention(_: int) -> None:
        queries, *keys_values = (leaf.transpose(1, 2) for leaf in leaves)
        attend(queries, tuple(keys_values[:2]), tuple(keys_values[2:]), bounds).backward(upstream)
        for leaf in leaves:
            leaf.grad = None

    record("attention", attention, layers)
    lm_head = random(config.vocab_size, width, grad=False)
    w2 = random(config.vocab_size, config.markov_rank)
    hidden, features = random(rows, width), random(rows, config.markov_rank)

    def vocabulary(_: int) -> None:
        fused_objective(
            hidden,
            features,
            lm_head,
            w2,
            batch.target_states_BSD.reshape(-1, width)[batch.target_slots_U],
            batch.target_of_row_N,
            batch.labels_BAG.reshape(-1),
            batch.valid_BAG.reshape(-1),
            None,
            target_bounds_M2=batch.target_bounds_M2,
            block_size=shape.block,
            config=objective,
            term_scale=1.0,
            confidence_scale=1.0,
        ).loss.backward()
        hidden.grad = features.grad = w2.grad = None

    record("vocabulary_and_objective", vocabulary)
    unique = num_targets(batch)

    def vocabulary_products(_: int) -> None:
        logits = hidden.detach() @ lm_head.t()
        logits.addmm_(features.detach(), w2.detach().t())
        batch.target_states_BSD[0, :unique] @ lm_head.t()
        logits @ lm_head
        logits @ w2.detach()
        logits.t() @ features.detach()

    record("vocabulary_products", vocabulary_products)
    found["part_objective_kernels_ms"] = (
        found["part_vocabulary_and_objective_ms"] - found["part_vocabulary_products_ms"]
    )
    return found


def optimizer_overhead(
    geometry: Geometry,
    shape: Shape,
    objective: ObjectiveConfig,
    accumulation: int,
    with_kernels: bool,
) -> dict[str, float]:
    """A whole optimizer step through DeepSpeed against its forward and backward passes alone."""
    join_alone()
    batches = [random_batch(geometry, shape, seed) for seed in range(3)]
    model = build(geometry, shape, objective)
    scales = [[1.0 / float(d) for d in batch_denominators(b, objective)] for b in batches]
    train = TrainSettings(
        learning_rate=1e-4, global_batch_size=accumulation, micro_batch_size=1, zero_stage=1
    )
    engine, _ = initialise_engine(model, train, world_size=1)

    def step(index: int) -> None:
        for micro in range(accumulation):
            place = (index * accumulation + micro) % len(batches)
            engine.set_gradient_accumulation_boundary(micro + 1 == accumulation)
            result = engine(batches[place], *scales[place])
            engine.backward(result.loss, scale_wrt_gas=False)
            engine.step()

    _, _, peak = measured(step, 1)
    one_pass = step_of(build(geometry, shape, objective), batches)

    def passes(index: int) -> None:
        for micro in range(accumulation):
            one_pass(index * accumulation + micro)

    # In turn: a GPU that has worked for a while is slower than one that has not.
    (alone, _), (ms, spread) = in_turn((passes, step), OPTIMIZER_ROUNDS)
    if with_kernels:
        print_kernels(step)
    return {
        "optimizer_step_ms": ms,
        "optimizer_step_spread_ms": spread,
        "optimizer_step_passes_ms": alone,
        "optimizer_overhead_fraction": ms / alone - 1.0,
        "optimizer_step_peak_memory_gb": peak,
        "optimizer_accumulation_steps": accumulation,
    }


def long_context(
    geometry: Geometry, objective: ObjectiveConfig, steps: int
) -> Iterator[dict[str, float]]:
    """Time and memory over tokens and anchors, one shape after another."""
    for tokens, anchors in LONG_SHAPES:
        torch._dynamo.reset()
        free()
        result = ours(geometry, Shape(tokens, anchors, 7), objective, steps)
        yield {
            f"tokens_{tokens}_anchors_{anchors}_{name}": result[name]
            for name in ("step_ms", "peak_memory_gb", "necessary_tflop")
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="8b")
    parser.add_argument("--tokens", type=positive, default=4096)
    parser.add_argument("--anchors", type=positive, default=512)
    parser.add_argument("--block", type=positive, default=7)
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--chunk-rows", type=int, default=0)
    parser.add_argument("--deepspec", type=Path, help="a checkout of DeepSpec to run beside")
    parser.add_argument("--profile", action="store_true", help="print the step's kernels")
    parser.add_argument("--float8", action="store_true", help="also with objective.float8_logits")
    parser.add_argument("--parts", action="store_true", help="also each part alone")
    parser.add_argument("--optimizer", type=positive, default=0, metavar="ACCUMULATION")
    parser.add_argument("--block16", action="store_true", help="also with blocks of 16")
    parser.add_argument("--long", action="store_true", help="instead: 32,768 and 131,072 tokens")
    parser.add_argument("--name", default="", help="of the record; by default the geometry")
    parser.add_argument("--out", type=Path, default=None, help="folder of the record")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is there; allowed: a machine with one")
    if args.deepspec and not (args.deepspec / "deepspec").is_dir():
        parser.error(f"--deepspec {args.deepspec} has no folder deepspec; name a checkout of it")
    geometry = GEOMETRIES[args.geometry]
    shape = Shape(args.tokens, args.anchors, args.block)
    objective = ObjectiveConfig(chunk_rows=args.chunk_rows)
    rate = matmul_tflops()
    figures: dict[str, Any] = {"matmul_tflops": rate}
    if args.long:
        for found in long_context(geometry, objective, args.steps):
            figures |= found
            write_record(args.name or "train_step_long", figures, folder=args.out)
        return
    figures |= ours(geometry, shape, objective, args.steps)
    figures["mfu"] = figures["necessary_tflop"] / figures["step_ms"] * 1e3 / rate
    print(figures, flush=True)
    free()
    if args.profile:
        print_kernels(
            step_of(build(geometry, shape, objective), [random_batch(geometry, shape, 0)])
        )
        free()
    if args.float8:
        quantised = ObjectiveConfig(chunk_rows=args.chunk_rows, float8_logits=True)
        result = ours(geometry, shape, quantised, args.steps)
        figures["float8_step_ms"] = result["step_ms"]
        figures["float8_peak_memory_gb"] = result["peak_memory_gb"]
        free()
    if args.block16:
        result = ours(geometry, Shape(args.tokens, args.anchors, 16), objective, args.steps)
        figures["block16_step_ms"] = result["step_ms"]
        figures["block16_peak_memory_gb"] = result["peak_memory_gb"]
        figures["block16_necessary_tflop"] = result["necessary_tflop"]
        free()
    if args.parts:
        figures |= part_times(geometry, shape, objective)
        print(figures, flush=True)
    if args.deepspec:
        torch._dynamo.reset()
        figures |= deepspec(args.deepspec, geometry, shape, args.steps)
        for name in ("step_ms", "float8_step_ms"):
            if name in figures:
                key = "speedup_vs_deepspec" if name == "step_ms" else "float8_speedup_vs_deepspec"
                figures[key] = figures["deepspec_step_ms"] / figures[name]
        print(figures, flush=True)
        free()
    if args.optimizer:
        # Last: what DeepSpeed holds is not given back.
        torch._dynamo.reset()
        figures |= optimizer_overhead(geometry, shape, objective, args.optimizer, args.profile)
    write_record(args.name or f"train_step_{args.geometry}", figures, folder=args.out)


if __name__ == "__main__":
    main()
