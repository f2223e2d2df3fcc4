"""Means over log intervals, and steps that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from splitserve.train.metrics import MetricWindow


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sums_of(count: float, *, confidence: bool = True) -> dict[str, torch.Tensor]:
    """Sums whose means are 1, 2, 3 ... whatever the count."""
    scalars = {
        "ce_sum": 1.0,
        "l1_sum": 2.0,
        "weight_sum": 1.0,
        "expected_accept_sum": 3.0,
        "block_count": 1.0,
    }
    if confidence:
        scalars |= {"confidence_sum": 4.0, "decay_weight_sum": 1.0, "confidence_error_sum": 10.0}
    found = {name: torch.tensor(count * value) for name, value in scalars.items()}
    for name, value in (("valid_count", 1.0), ("alpha_sum", 0.5), ("hit_sum", 0.25)):
        found[name] = torch.full((2,), count * value)
    return found


@pytest.mark.parametrize("confidence", [True, False])
def test_means_are_of_the_sums_of_all_micro_batches(confidence: bool) -> None:
    """Two steps of uneven micro-batches: no average of averages."""
    window = MetricWindow(world_size=1)
    for step, counts in enumerate(([4.0, 8.0], [2.0])):
        for count in counts:
            metrics = sums_of(count, confidence=confidence)
            window.add(metrics, torch.tensor(count, requires_grad=True))
        window.end_step(step, 0.1 * (step + 1), torch.tensor(float(step + 1)))
    values = window.reduce()
    assert values["loss"] == pytest.approx((4.0 + 8.0 + 2.0) / 2)
    assert values["grad_norm"] == pytest.approx(1.5)
    assert values["learning_rate"] == 0.2
    assert (values["ce"], values["l1"], values["expected_accept_length"]) == (1.0, 2.0, 3.0)
    assert values["num_blocks"] == 14.0
    assert values["alpha"] == [0.5, 0.5] and values["top1"] == [0.25, 0.25]
    assert values.get("confidence") == (4.0 if confidence else None)
    assert values.get("confidence_error") == (5.0 if confidence else None)


def test_a_window_starts_anew_once_it_is_read() -> None:
    window = MetricWindow(world_size=1)
    for loss in (5.0, 7.0):
        window.add(sums_of(3.0), torch.tensor(loss))
        window.end_step(0, 0.1, 2.0)
        values = window.reduce()
        assert (values["loss"], values["grad_norm"], values["num_blocks"]) == (loss, 2.0, 3.0)


def test_the_loss_is_the_mean_over_ranks_of_what_their_gradients_are_averaged_from() -> None:
    """Each rank's loss is multiplied by the number of ranks, which DeepSpeed divides by."""
    window = MetricWindow(world_size=4)
    window.add(sums_of(1.0), torch.tensor(8.0))
    window.end_step(0, 0.1, None)
    assert window.reduce()["loss"] == 2.0


@pytest.mark.parametrize(
    ("loss", "norm"),
    [
        (float("nan"), torch.tensor(1.0)),
        (float("inf"), torch.tensor(1.0)),
        (1.0, torch.tensor(float("nan"))),
        (1.0, float("inf")),
        (1.0, torch.tensor(-1.0)),
    ],
)
def test_a_step_that_is_not_finite_is_refused_one_step_late(
    loss: float, norm: torch.Tensor | float
) -> None:
    window = MetricWindow(world_size=1)
    window.add(sums_of(1.0), torch.tensor(1.0))
    window.add(sums_of(1.0), torch.tensor(loss))
    window.end_step(7, 0.1, norm)
    window.require_finite("runs/x", unread=1)
    window.add(sums_of(1.0), torch.tensor(1.0))
    window.end_step(8, 0.1, 1.0)
    with pytest.raises(ValueError, match=r"step 7: .* not finite.*runs/x with resume=true"):
        window.require_finite("runs/x", unread=1)


def test_every_step_is_read_before_something_is_saved() -> None:
    window = MetricWindow(world_size=1)
    window.add(sums_of(1.0), torch.tensor(float("nan")))
    window.end_step(3, 0.1, 1.0)
    window.require_finite("runs/x", unread=1)
    with pytest.raises(ValueError, match="step 3"):
        window.require_finite("runs/x")
    window.require_finite("runs/x")
