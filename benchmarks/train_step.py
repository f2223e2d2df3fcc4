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
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.draft_step import (
    GEOMETRIES,
    Geometry,
    Shape,
    build,
    free,
    matmul_tflops,
    measured,
    ours,
    random_batch,
    step_of,
)
from benchmarks.options import positive
from benchmarks.record import write_record
from benchmarks.train_parts import join_alone, optimizer_overhead, part_times, print_kernels
from dspark.objective import ObjectiveConfig

LONG_SHAPES = ((32_768, 512), (131_072, 512), (131_072, 2048), (32_768, 2048))


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
