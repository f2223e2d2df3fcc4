"""Process group, optimizer and DeepSpeed engine of a trainer rank."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from splitserve.settings import TrainSettings


def deepspeed_config(train: TrainSettings, world_size: int) -> dict[str, Any]:
    """DeepSpeed's own settings for a run.

    Gradients are accumulated and exchanged in float32, and DeepSpeed does no scaling of its own
    that the loss does not undo: sums are divided by the window's total weight.

    How many micro-batches a window has differs from step to step: who trains says which is the last
    with `set_gradient_accumulation_boundary`, and the number here is never asked for.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": train.clip_norm,
        "zero_optimization": {"stage": train.zero_stage},
        "communication_data_type": "fp32",
        "steps_per_print": 2**31,
        # It would wait for the device twice in every forward pass.
        "timers": {"throughput": {"enabled": False}},
    }
    if train.dtype == "bfloat16":
        # Each gradient goes to its float32 sum as soon as it is there, and is let go of.
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def init_process_group(
    device: str, *, rank: int, world_size: int, master_port: int, timeout_seconds: float
) -> None:
    """Join the ranks of this node: gloo for what lies on the CPU, NCCL for what lies on GPUs.

    Args:
        device: "cpu", or the rank's own "cuda:N".
    """
    on_cpu = device == "cpu"
    os.environ.update(
        DS_ACCELERATOR="cpu" if on_cpu else "cuda",
        RANK=str(rank),
        # To DeepSpeed this is the number of the GPU.
        LOCAL_RANK=str(rank if on_cpu else torch.device(device).index),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(master_port),
    )
    import deepspeed

    # DeepSpeed would compile a shared-memory all-reduce at start-up, which takes half a
    # minute and a compiler; gloo serves the few megabytes that are exchanged here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not on_cpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if on_cpu else "cpu:gloo,cuda:nccl",
        init_method=f"tcp://127.0.0.1:{master_port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=None if on_cpu else torch.device(device),
    )
    deepspeed.init_distributed(dist_init_required=False, verbose=False)


def initialise_engine(
    model: torch.nn.Module, train: TrainSettings, world_size: int
) -> tuple[Any, torch.optim.Optimizer]:
    """The model under DeepSpeed, and the optimizer whose learning rate the run sets.

    Raises:
        ValueError: the DeepSpeed that is installed is not one that `accumulate` knows.
    """
    import deepspeed

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train.learning_rate, fused=True, **_adamw_settings(train)
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(train, world_size)
    )
    if train.dtype == "bfloat16":
        from splitserve.train.accumulate import take_over

        take_over(engine.optimizer)
    return engine, optimizer


def apply_settings(engine: Any, train: TrainSettings) -> None:
    """Let an engine that has read a checkpoint go on with the run's settings, not with those of
    then: DeepSpeed keeps them beside the optimizer's state. The learning rate is set every step."""
    engine.optimizer.clip_grad = train.clip_norm
    for group in engine.optimizer.param_groups:
        group.update(_adamw_settings(train))


def _adamw_settings(train: TrainSettings) -> dict[str, Any]:
    return {
        "betas": (train.betas[0], train.betas[1]),
        "eps": train.eps,
        "weight_decay": train.weight_decay,
    }
