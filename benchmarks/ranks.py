"""Gradients of two trainer ranks against one's: `python -m benchmarks.ranks [--device cuda]`.

The same samples, cut into micro-batches once for one rank and once for two, go through DeepSpeed to
the gradients that its optimizer is given: bfloat16 weights, float32 sums, as in a run. Prints and
records the largest relative distance of a parameter's gradient, and both norms. On GPUs, each rank
has one of its own and they talk over NCCL.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from benchmarks.record import write_record
from dspark.batch import TrainingBatch, TrainingSample, batch_denominators, lay_out
from dspark.config import DraftConfig
from dspark.initial import initial_draft
from dspark.objective import ObjectiveConfig
from dspark.training import DraftWithLoss
from serving.ports import free_port
from splitserve.settings import TrainSettings
from splitserve.train.optimizer import init_process_group, initialise_engine

DRAFT = DraftConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=1024,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=512,
    block_size=7,
    target_layer_ids=(1, 4),
    num_target_layers=6,
    mask_token_id=5,
    markov_rank=32,
)
OBJECTIVE = ObjectiveConfig()
NUM_MICRO_BATCHES = 4
ROW_TOKENS = 256


def micro_batch(number: int, device: str) -> TrainingBatch:
    """Three documents in one row, of other lengths in each micro-batch."""
    generator = torch.Generator().manual_seed(number)
    samples, states = [], []
    for part in range(3):
        length = 40 + 11 * part + 5 * number
        ids = torch.randint(DRAFT.vocab_size, (length,), generator=generator)
        mask = torch.rand(length, generator=generator) < 0.9
        samples.append(TrainingSample(f"{number}/{part}", 0, ids, mask))
        features, last = (
            torch.randn(length, width, generator=generator).bfloat16().to(device)
            for width in (DRAFT.num_context_features, DRAFT.hidden_size)
        )
        states.append((features, last))
    layout = lay_out(
        samples,
        num_anchors=12,
        block_size=DRAFT.block_size,
        seed=0,
        row_tokens=ROW_TOKENS,
        max_documents=len(samples),
    )
    into = layout.empty_states(
        DRAFT.num_context_features, DRAFT.hidden_size, torch.bfloat16, device
    )
    return layout.with_states(states, into)


def gradients(rank: int, world_size: int, port: int, device: str, out: str) -> None:
    """One rank's part of a step, up to the gradients; rank 0 writes them to `out`."""
    torch.set_num_threads(1)
    place = device if device == "cpu" else f"cuda:{rank}"
    init_process_group(
        place, rank=rank, world_size=world_size, master_port=port, timeout_seconds=120.0
    )
    generator = torch.Generator().manual_seed(7)
    head = torch.randn(DRAFT.vocab_size, DRAFT.hidden_size, generator=generator) * 0.2
    head = head.bfloat16().to(place)
    model = DraftWithLoss(initial_draft(DRAFT, 0), head, head, OBJECTIVE).to(place)
    train = TrainSettings(dtype="bfloat16", zero_stage=1, clip_norm=1e9, learning_rate=1e-6)
    engine, _ = initialise_engine(model, train, world_size)
    batches = [micro_batch(number, place) for number in range(NUM_MICRO_BATCHES)]
    weights = [batch_denominators(batch, OBJECTIVE) for batch in batches]
    # DeepSpeed averages over the ranks.
    scales = [world_size / float(sum(float(w[i]) for w in weights)) for i in (0, 1)]
    mine = batches[rank::world_size]
    for number, batch in enumerate(mine, 1):
        engine.set_gradient_accumulation_boundary(number == len(mine))
        engine.backward(engine(batch, *scales).loss, scale_wrt_gas=False)
    # After the boundary's backward pass every rank has the exchanged sums.
    summed = {
        name: parameter._hp_grad.detach().float().cpu().reshape(parameter.shape).clone()
        for name, parameter in model.draft.named_parameters()
    }
    engine.step()
    if rank == 0:
        torch.save({"gradients": summed, "norm": float(engine.get_global_grad_norm())}, out)
    torch.distributed.destroy_process_group()


def compare(device: str, folder: Path) -> dict[str, float]:
    """Distances between the gradients of one rank and of two."""
    found: list[dict[str, Any]] = []
    for world_size in (1, 2):
        out = folder / f"ranks_{world_size}.pt"
        multiprocessing.spawn(
            gradients, (world_size, free_port(), device, str(out)), nprocs=world_size
        )
        found.append(torch.load(out))
    one, two = found
    errors = {
        name: float((two["gradients"][name] - grad).norm() / grad.norm().clamp(min=1e-20))
        for name, grad in one["gradients"].items()
    }
    return {
        "gradient_largest_relative_error": max(errors.values()),
        "gradient_norm_1_rank": one["norm"],
        "gradient_norm_2_ranks": two["norm"],
        "gradient_parameters": len(errors),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path, default=None, help="folder of the record")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        write_record("ranks", compare(options.device, Path(folder)), folder=options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
