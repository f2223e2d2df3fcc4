"""Kernels of the optimizer step against torch's operations in float32 and float64."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from triton_testing import CUDA, DEVICE, triton_module

pytest.importorskip("triton", reason="triton has no build for this platform")

BLOCK = 64
NUMBERS = [1, 2, 63, 64, 65, 3 * 64 + 6]
"""Of elements: below, at and above a program's, and no multiple of 16."""


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with triton_module("splitserve.train.kernels") as module, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SUM_BLOCK", BLOCK)
        patch.setattr(module, "ADAMW_BLOCK", BLOCK)
        yield module


def random(number: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # A place within a larger tensor, as each parameter's: at no multiple of 16 bytes.
    return torch.randn(number + 3, generator=generator).to(DEVICE)[3:]


def in_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """As the kernel stores them: the interpreter does not round, but cuts off."""
    kept = values if CUDA else (values.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return kept.bfloat16()


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("number", NUMBERS)
def test_sums_are_those_of_one_after_the_other(
    kernels: ModuleType, number: int, pair: bool, fresh: bool
) -> None:
    first, second = random(number, 1).bfloat16(), random(number, 2).bfloat16()
    memory = torch.full((number + 2,), float("nan"), device=DEVICE)
    total = memory[1:-1]
    if not fresh:
        total.copy_(random(number, 3))
    wanted = first.float() if fresh else total + first
    wanted = wanted + second if pair else wanted
    kernels.add_gradients(total, first, second if pair else None, fresh=fresh)
    assert torch.equal(total, wanted)
    assert memory[0].isnan() and memory[-1].isnan()


@pytest.mark.parametrize("number", NUMBERS)
def test_adamw_is_that_of_torch(kernels: ModuleType, number: int) -> None:
    rate, betas, eps, decay = 0.03, (0.9, 0.95), 1e-8, 0.1
    masters = random(number, 1).clone()
    weights, means, squares = masters.bfloat16(), *torch.zeros(2, number, device=DEVICE)
    reference = masters.double().requires_grad_()
    plain = torch.optim.AdamW([reference], lr=rate, betas=betas, eps=eps, weight_decay=decay)
    for step in range(1, 4):
        gradients, factor = 10.0**-step * random(number, 10 + step), 0.5**step
        reference.grad = gradients.double() * factor
        plain.step()
        biases = [1.0 - beta**step for beta in betas]
        factors = torch.tensor([factor, rate / biases[0], biases[1] ** -0.5, 1.0], device=DEVICE)
        kernels.adamw(
            weights,
            masters,
            gradients,
            means,
            squares,
            factors,
            decay=rate * decay,
            betas=betas,
            eps=eps,
        )
        state = plain.state[reference]
        for found, wanted in (
            (masters, reference.detach()),
            (means, state["exp_avg"]),
            (squares, state["exp_avg_sq"]),
        ):
            torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-6)
        assert torch.equal(weights, in_bfloat16(masters))


def test_adamw_changes_nothing_where_it_is_told_so(kernels: ModuleType) -> None:
    values = [random(BLOCK + 1, seed) for seed in range(5)]
    values[0] = values[0].bfloat16()
    before = [value.clone() for value in values]
    factors = torch.tensor([1.0, float("nan"), float("inf"), 0.0], device=DEVICE)
    kernels.adamw(*values, factors, decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    assert all(torch.equal(a, b) for a, b in zip(values, before, strict=True))
