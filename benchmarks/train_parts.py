"""Parts of a training step on one GPU: each alone, its kernels, and the optimizer around it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.draft_step import (
    Geometry,
    Shape,
    build,
    free,
    in_turn,
    measured,
    num_targets,
    random_batch,
    step_of,
    time_ms,
)
from dspark.attention import ContextBounds, attend
from dspark.batch import batch_denominators
from dspark.objective import ObjectiveConfig, fused_objective
from splitserve.settings import TrainSettings
from splitserve.train.optimizer import init_process_group, initialise_engine

OPTIMIZER_ROUNDS = 8
"""Windows of passes alone, and as many whole steps."""


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


def join_alone() -> None:
    """A process group of this process, for what reduces over ranks."""
    if not torch.distributed.is_initialized():
        init_process_group("cuda:0", rank=0, world_size=1, master_port=29534, timeout_seconds=60.0)
