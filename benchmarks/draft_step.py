"""A training step of random data on one GPU, and how it is timed; `train_step` runs it."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dspark.batch import TrainingBatch, TrainingSample, batch_denominators, lay_out
from dspark.config import DraftConfig
from dspark.flops import StepSize, necessary_flops
from dspark.model import DSparkDraft
from dspark.objective import ObjectiveConfig
from dspark.training import DraftWithLoss

MATMUL_SIDE = 8192


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
