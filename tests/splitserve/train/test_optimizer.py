"""DeepSpeed's optimizer steps: of the draft, by type and stage, and of windows against float32."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton_testing import CUDA, copy_module

from dspark.batch import TrainingBatch, TrainingSample, batch_denominators, lay_out
from dspark.config import DraftConfig
from dspark.initial import initial_draft
from dspark.objective import ObjectiveConfig
from dspark.training import DraftWithLoss
from serving.ports import free_port
from splitserve.settings import TrainSettings
from splitserve.train import optimizer
from splitserve.train.optimizer import (
    apply_settings,
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


# --- windows against plain float32 ---------------------------------------------------------------

TRAIN = TrainSettings(learning_rate=0.05, clip_norm=0.5, weight_decay=0.1)
RARE = {(1, 0, 1), (1, 0, 0), (2, 1, 0), (3, 0, 1), (3, 2, 0)}
"""Window, micro-batch and rank whose loss reads `rare`; window 4 has none of it on any rank."""
WINDOWS = [1, 2, 3, 4, 5]
"""Micro-batches of each."""
SCALES = {0: 1.0, 1: 1e-3, 2: 30.0, 3: 2e-3, 4: 0.3}
"""Of each window's losses, so that some windows are clipped."""


class Loss(NamedTuple):
    loss: torch.Tensor


class Model(nn.Module):
    """Of an odd number of parameters, one of which not every loss reads."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.into = nn.Linear(7, 50)
        self.out = nn.Linear(50, 3, bias=False)
        self.rare = nn.Parameter(torch.ones(5))
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor, scale: float, with_rare: bool) -> Loss:
        out = self.out(torch.tanh(self.into(x))).float()
        loss = out.square().sum()
        if with_rare:
            loss = loss + (self.rare.float() * x[0, :5].float()).exp().sum()
        return Loss(loss * scale)


def micro_batch(window: int, number: int, rank: int, device: str) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(100 * window + 10 * number + rank)
    x = torch.randn(4, 7, generator=generator).bfloat16().to(device)
    return x, SCALES[window], (window, number, rank) in RARE


class Reference:
    """Gradients one after the other into float32, clipped, and torch's plain AdamW."""

    def __init__(self, device: str) -> None:
        self.model = Model().bfloat16().to(device)
        self.masters = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        self.adamw = torch.optim.AdamW(
            self.masters,
            lr=TRAIN.learning_rate,
            betas=(TRAIN.betas[0], TRAIN.betas[1]),
            eps=TRAIN.eps,
            weight_decay=TRAIN.weight_decay,
            foreach=False,
        )

    def step(self, window: int, world_size: int, device: str, rate: float) -> float:
        """The gradient's norm."""
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        for rank in range(world_size):
            for number in range(WINDOWS[window]):
                self.model.zero_grad()
                self.model(*micro_batch(window, number, rank, device)).loss.backward()
                for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                    if parameter.grad is not None:
                        master.grad += parameter.grad.float() / world_size
        norm = nn.utils.clip_grad_norm_(self.masters, TRAIN.clip_norm)
        self.adamw.param_groups[0]["lr"] = rate
        self.adamw.step()
        return float(norm)


def new_engine(kernels: Any, world_size: int = 1) -> tuple[Any, Model, torch.optim.Optimizer]:
    model = Model()
    engine, adamw = initialise_engine(model, TRAIN, world_size)
    if kernels is not None:
        engine.optimizer.kernels = kernels
    return engine, model, adamw


def run_window(engine: Any, window: int, rank: int, device: str) -> None:
    """All but the step itself."""
    for number in range(WINDOWS[window]):
        last = number + 1 == WINDOWS[window]
        engine.set_gradient_accumulation_boundary(last)
        batch = micro_batch(window, number, rank, device)
        engine.backward(engine(*batch).loss, scale_wrt_gas=False)
        if not last:
            engine.step()


def rate_of(window: int) -> float:
    return TRAIN.learning_rate / (1 + window)


def check_windows(rank: int, world_size: int, kernels: Any, device: str = "cpu") -> None:
    """Masters, moments and weights of several windows are the reference's."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine, model, adamw = new_engine(kernels, world_size)
    plain = Reference(device)
    clipped = []
    for window in range(len(WINDOWS)):
        adamw.param_groups[0]["lr"] = rate_of(window)
        run_window(engine, window, rank, device)
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("error")
        engine.step()
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("default")
        norm = plain.step(window, world_size, device, rate_of(window))
        clipped.append(norm > TRAIN.clip_norm)
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-5)
        for parameter, copy, master in zip(
            model.parameters(), plain.model.parameters(), plain.masters, strict=True
        ):
            state = plain.adamw.state[master]
            for found, wanted in (
                (safe_get_full_fp32_param(parameter), master.detach()),
                (safe_get_full_optimizer_state(parameter, "exp_avg"), state["exp_avg"]),
                (safe_get_full_optimizer_state(parameter, "exp_avg_sq"), state["exp_avg_sq"]),
            ):
                assert float((found.view_as(wanted) - wanted).norm()) <= 1e-5 * float(wanted.norm())
            # The interpreter does not round to bfloat16, but cuts off.
            torch.testing.assert_close(
                parameter.detach().float(), master.detach(), rtol=2.0**-7, atol=0.0
            )
            copy.data.copy_(parameter.detach())
    assert True in clipped and False in clipped


def check_ranks(rank: int, world_size: int, port: int, device: str) -> None:
    torch.set_num_threads(1)
    place = device if device == "cpu" else f"cuda:{rank}"
    init_process_group(
        place, rank=rank, world_size=world_size, master_port=port, timeout_seconds=60.0
    )
    if device == "cpu":
        check_windows(rank, world_size, None)
        with pytest.MonkeyPatch.context() as patch:
            check_windows(rank, world_size, interpreted(patch))
    else:
        check_windows(rank, world_size, None, place)
    dist.destroy_process_group()


def interpreted(patch: pytest.MonkeyPatch) -> Any:
    """The kernels on the CPU, also where there is a GPU."""
    patch.setenv("TRITON_INTERPRET", "1")
    return copy_module("splitserve.train.kernels", patch)


@pytest.fixture(params=["torch", "kernels"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "kernels":
            pytest.importorskip("triton", reason="triton has no build for this platform")
            yield interpreted(patch)
        else:
            yield None


def test_windows_are_those_of_plain_float32(kernels: Any) -> None:
    check_windows(0, 1, kernels)


def test_windows_of_two_ranks_are_those_of_plain_float32() -> None:
    pytest.importorskip("triton", reason="triton has no build for this platform")
    multiprocessing.spawn(check_ranks, (2, free_port(), "cpu"), nprocs=2)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_windows_on_a_gpu_without_a_wait_of_the_host() -> None:
    multiprocessing.spawn(check_ranks, (1, free_port(), "cuda"), nprocs=1)


def test_sums_are_deepspeeds_own_to_the_last_bit(kernels: Any) -> None:
    """Its class's sums of the same gradients, in the order in which they came."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    ours, _, _ = new_engine(kernels)
    theirs, _, _ = new_engine(None)
    theirs.optimizer.__class__ = BF16_Optimizer
    for flat in theirs.optimizer.fp32_groups_gradients_flat:
        flat.zero_()
    for window in range(len(WINDOWS)):
        for engine in (ours, theirs):
            run_window(engine, window, 0, "cpu")
        for found, wanted in zip(
            ours.optimizer.fp32_groups_gradients_flat,
            theirs.optimizer.fp32_groups_gradients_flat,
            strict=True,
        ):
            assert torch.equal(found, wanted)
        for engine in (ours, theirs):
            engine.optimizer.clear_hp_grads()


def state_of(engine: Any) -> list[torch.Tensor]:
    held = engine.optimizer
    states = [held.optimizer.state[masters] for masters in held.fp32_groups_flat_partition]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step")]
    return [*held.bf16_groups_flat, *held.fp32_groups_flat_partition, *moments]


def test_resumed_windows_are_the_same_to_the_last_bit(kernels: Any, tmp_path: Path) -> None:
    engine, _, _ = new_engine(kernels)
    for window in range(len(WINDOWS)):
        if window == 2:
            engine.save_checkpoint(str(tmp_path), tag="state", save_latest=False)
        run_window(engine, window, 0, "cpu")
        engine.step()
    resumed, _, _ = new_engine(kernels)
    # What it did before is forgotten.
    run_window(resumed, 0, 0, "cpu")
    resumed.step()
    resumed.load_checkpoint(str(tmp_path), tag="state")
    for window in range(2, len(WINDOWS)):
        run_window(resumed, window, 0, "cpu")
        resumed.step()
    for found, wanted in zip(state_of(resumed), state_of(engine), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("dtype", "stage"), [("bfloat16", 1), ("bfloat16", 2), ("float32", 1)])
def test_a_resumed_run_goes_on_with_its_own_settings(
    dtype: str, stage: int, tmp_path: Path
) -> None:
    then = replace(TRAIN, dtype=dtype, zero_stage=stage)
    engine, _ = initialise_engine(Model(), then, 1)
    engine.save_checkpoint(str(tmp_path), tag="state", save_latest=False)
    now = replace(then, clip_norm=0.125, weight_decay=0.5, betas=[0.5, 0.75], eps=1e-3)
    resumed, adamw = initialise_engine(Model(), now, 1)
    resumed.load_checkpoint(str(tmp_path), tag="state")
    assert resumed.optimizer.clip_grad == then.clip_norm != now.clip_norm
    apply_settings(resumed, now)
    assert resumed.optimizer.clip_grad == now.clip_norm
    for group in adamw.param_groups:
        assert (*group["betas"], group["eps"], group["weight_decay"]) == (0.5, 0.75, 1e-3, 0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_window_that_is_not_finite_changes_nothing(
    kernels: Any, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, _ = new_engine(kernels)
    run_window(engine, 0, 0, "cpu")
    engine.step()
    before = [value.clone() for value in state_of(engine)]
    with monkeypatch.context() as patch:
        patch.setitem(SCALES, 1, bad)
        run_window(engine, 1, 0, "cpu")
        engine.step()
    assert not torch.as_tensor(engine.get_global_grad_norm()).isfinite()
    assert all(torch.equal(a, b) for a, b in zip(state_of(engine), before, strict=True))
    run_window(engine, 2, 0, "cpu")
    engine.step()
    assert float(engine.get_global_grad_norm()) > 0.0
    assert not torch.equal(state_of(engine)[0], before[0])


class NothingIsRead(TorchDispatchMode):
    """Refuses what gives the host a number of the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        assert "_local_scalar_dense" not in str(func) and "is_nonzero" not in str(func), func
        found: torch.Tensor = func(*args, **(kwargs or {}))
        return found


def test_the_host_reads_nothing_in_a_step() -> None:
    engine, _, _ = new_engine(None)
    for window in range(2):
        run_window(engine, window, 0, "cpu")
        with NothingIsRead():
            engine.step()


def test_a_deepspeed_without_what_is_built_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from splitserve.train import accumulate

    monkeypatch.setattr(accumulate, "_USED", (*accumulate._USED, "not_there"))
    with pytest.raises(ValueError, match="BF16_Optimizer has no not_there"):
        new_engine(None)
    # What it does not name is not there either.
    monkeypatch.delattr("deepspeed.runtime.utils.all_gather_dp_groups")
    monkeypatch.delitem(sys.modules, accumulate.__name__)
    with pytest.raises(ValueError, match=r"all_gather_dp_groups.*install deepspeed"):
        new_engine(None)


def test_a_deepspeed_whose_hooks_go_another_way_is_refused() -> None:
    engine, _, _ = new_engine(None)
    engine.optimizer.accumulate_hp_grads_and_remove_lp = lambda *_: None
    with pytest.raises(ValueError, match="without gradients"):
        run_window(engine, 0, 0, "cpu")
