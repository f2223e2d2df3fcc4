"""The fused objective on the CPU beside its naive form: time and memory at the demo's shapes.

    python -m benchmarks.objective_cpu

The naive form holds draft and target logits of every row and lets autograd find the gradients.
Each form runs in a process of its own on one thread, whose largest resident size is its memory.
Writes `benchmarks/results/objective_cpu.json`.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from benchmarks.record import write_record
from dspark.objective import ObjectiveConfig, fused_objective

VOCAB, WIDTH, RANK, BLOCK, BLOCKS = 49_152, 576, 128, 5, 48
UNIQUE = 185
STEPS = 5
CONFIG = ObjectiveConfig()


def inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    rows = BLOCKS * BLOCK

    def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*sizes, generator=g) * scale).bfloat16()

    return {
        "hidden_ND": normal(rows, WIDTH).requires_grad_(),
        "features_Nr": normal(rows, RANK).requires_grad_(),
        "lm_head_VD": normal(VOCAB, WIDTH, scale=0.15),
        "markov_w2_Vr": normal(VOCAB, RANK, scale=0.05).requires_grad_(),
        "target_states_UD": normal(UNIQUE, WIDTH),
        "target_index_N": torch.arange(rows) * UNIQUE // rows,
        "labels_N": torch.randint(VOCAB, (rows,), generator=g),
        "valid_N": torch.ones(rows, dtype=torch.bool),
    }


def fused(x: dict[str, torch.Tensor]) -> torch.Tensor:
    return fused_objective(
        **x,
        confidence_logits_N=None,
        block_size=BLOCK,
        config=CONFIG,
        term_scale=1.0,
        confidence_scale=1.0,
    ).loss


def naive(x: dict[str, torch.Tensor]) -> torch.Tensor:
    """The public DSpark loss as it is written down."""
    logits = (
        x["hidden_ND"] @ x["lm_head_VD"].t() + x["features_Nr"] @ x["markov_w2_Vr"].t()
    ).float()
    with torch.no_grad():
        states = x["target_states_UD"][x["target_index_N"]]
        target = torch.softmax((states @ x["lm_head_VD"].t()).float(), -1)
    ce = F.cross_entropy(logits, x["labels_N"], reduction="none")
    l1 = (torch.softmax(logits, -1) - target).abs().sum(-1)
    weights = torch.exp(-torch.arange(BLOCK) / CONFIG.decay).repeat(BLOCKS)
    return ((CONFIG.ce * ce + CONFIG.l1 * l1) * weights).sum()


def run(form: str) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    x = inputs()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(STEPS + 1):
        started = time.perf_counter()
        loss = {"fused": fused, "naive": naive}[form](x)
        loss.backward()
        seconds.append(time.perf_counter() - started)
        for value in x.values():
            value.grad = None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        f"{form}_ms": 1e3 * statistics.median(seconds[1:]),
        f"{form}_memory_mb": (peak - base) / 1024,
        f"{form}_loss": float(loss.detach()),
    }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(run(sys.argv[1])))
        return
    figures: dict[str, float] = {}
    for form in ("fused", "naive"):
        command = [sys.executable, "-m", "benchmarks.objective_cpu", form]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        figures |= json.loads(output.splitlines()[-1])
    figures["speedup"] = figures["naive_ms"] / figures["fused_ms"]
    write_record("objective_cpu", figures, command="python -m benchmarks.objective_cpu")


if __name__ == "__main__":
    main()
