"""DeepSpeed's optimizer steps on the draft: windows of several micro-batches, by type and stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dspark.batch import TrainingBatch, TrainingSample, batch_denominators, lay_out
from dspark.config import DraftConfig
from dspark.initial import initial_draft
from dspark.objective import ObjectiveConfig
from dspark.training import DraftWithLoss
from serving.ports import free_port
from splitserve.settings import TrainSettings
from splitserve.train import optimizer
from splitserve.train.optimizer import (
    deepspeed_config,
    init_process_group,
    initialise_engine,
)

CONFIG = DraftConfig(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=67,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    max_position_embeddings=256,
    block_size=3,
    target_layer_ids=(1, 4),
    num_target_layers=6,
    mask_token_id=5,
    markov_rank=6,
)
WIDTH = CONFIG.hidden_size
OBJECTIVE = ObjectiveConfig()


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    init_process_group("cpu", rank=0, world_size=1, master_port=free_port(), timeout_seconds=60.0)
    yield
    dist.destroy_process_group()


def make_batch(numbers: range, dtype: torch.dtype) -> TrainingBatch:
    samples, states = [], []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        length = 12 + 5 * number
        ids = torch.randint(CONFIG.vocab_size, (length,), generator=generator)
        mask = torch.ones(length, dtype=torch.bool)
        samples.append(TrainingSample(str(number), 0, ids, mask))
        states.append(
            (
                torch.randn(length, CONFIG.num_context_features, generator=generator).to(dtype),
                torch.randn(length, WIDTH, generator=generator).to(dtype),
            )
        )
    layout = lay_out(samples, num_anchors=4, block_size=CONFIG.block_size, seed=0)
    return layout.with_states(
        states, layout.empty_states(CONFIG.num_context_features, WIDTH, dtype)
    )


def norms(
    dtype: str, stage: int, cuts: list[range], monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> list[float]:
    """Gradient norms of two steps over the same samples, cut into micro-batches."""

    def config(*arguments: Any) -> dict[str, Any]:
        made = deepspeed_config(*arguments)
        if "bf16" in made:
            assert made["bf16"]["immediate_grad_update"]
            made["bf16"]["immediate_grad_update"] = at_once
        return made

    monkeypatch.setattr(optimizer, "deepspeed_config", config)
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    head = (torch.randn(CONFIG.vocab_size, WIDTH, generator=generator) * 0.4).to(kind)
    model = DraftWithLoss(initial_draft(CONFIG, 0), head, head, OBJECTIVE)
    train = TrainSettings(zero_stage=stage, dtype=dtype, learning_rate=1e-3)
    engine, _ = initialise_engine(model, train, world_size=1)
    batches = [make_batch(cut, kind) for cut in cuts]
    weights = [batch_denominators(batch, OBJECTIVE) for batch in batches]
    scales = [1.0 / float(sum(w[i] for w in weights)) for i in (0, 1)]
    found = []
    for _ in range(2):
        for number, batch in enumerate(batches, 1):
            engine.set_gradient_accumulation_boundary(number == len(batches))
            engine.backward(engine(batch, *scales).loss, scale_wrt_gas=False)
            engine.step()
        found.append(float(engine.get_global_grad_norm()))
    return found


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_is_that_of_the_window_however_it_is_cut(
    dtype: str, stage: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each micro-batch counts once: DeepSpeed adds them up in float32, also under bfloat16, and
    whether it takes each gradient at once or at the end of a pass."""
    whole = norms(dtype, stage, [range(4)], monkeypatch, at_once)
    cuts = [range(1), range(1, 2), range(2, 4)]
    parts = norms(dtype, stage, cuts, monkeypatch, at_once)
    assert parts == pytest.approx(whole, rel=1e-5 if dtype == "float32" else 2e-2)
