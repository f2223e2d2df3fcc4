"""Top-k and top-p where FlashInfer is missing."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from triton_testing import DEVICE, triton_module

pytest.importorskip("triton", reason="triton has no build for this platform")

NO_LIMIT = 1 << 30


@pytest.fixture(scope="module")
def renorm() -> Iterator[ModuleType]:
    with triton_module("splitserve.engine.renorm") as module:
        yield module


@pytest.fixture(params=[4, 16, 4096])
def block(request: pytest.FixtureRequest, renorm: ModuleType) -> Iterator[int]:
    """Tiles below, at and above the vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renorm, "BLOCK", request.param)
        yield request.param


def random_probs(rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.softmax(4 * torch.randn(rows, vocab, generator=generator), -1)


def expected_top_k(probs: torch.Tensor, k: int) -> torch.Tensor:
    kept = torch.where(
        probs >= probs.sort(descending=True).values[min(k, len(probs)) - 1], probs, 0
    )
    return kept / kept.sum()


def expected_top_p(probs: torch.Tensor, p: float) -> torch.Tensor:
    values = probs.sort(descending=True).values
    last = int((values.double().cumsum(0) < p).sum())
    kept = torch.where(probs >= values[min(last, len(values) - 1)], probs, 0)
    return kept / kept.sum()


def test_top_k(renorm: ModuleType, block: int) -> None:
    limits = [1, 2, 3, 15, 16, 17, 36, 37, NO_LIMIT]
    probs = random_probs(len(limits), 37)
    found = renorm.top_k_renorm(probs.clone().to(DEVICE), torch.tensor(limits, device=DEVICE)).cpu()
    for row, limit in enumerate(limits):
        wanted = probs[row] if limit >= 37 else expected_top_k(probs[row], limit)
        torch.testing.assert_close(found[row], wanted, rtol=1e-5, atol=0.0)


def test_top_p(renorm: ModuleType, block: int) -> None:
    limits = [0.0, 1e-6, 0.3, 0.5, 0.9, 0.99, 0.999999, 1.0]
    probs = random_probs(len(limits), 37)
    found = renorm.top_p_renorm(probs.clone().to(DEVICE), torch.tensor(limits, device=DEVICE)).cpu()
    for row, limit in enumerate(limits):
        wanted = probs[row] if limit == 1.0 else expected_top_p(probs[row], limit)
        torch.testing.assert_close(found[row], wanted, rtol=1e-5, atol=0.0)


def test_a_greedy_row_keeps_the_first_of_the_likeliest(renorm: ModuleType, block: int) -> None:
    probs = torch.tensor([[0.1, 0.2, 0.3, 0.0, 0.3, 0.1], [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]])
    limits = torch.tensor([1, 6], dtype=torch.int32, device=DEVICE)
    found = renorm.top_k_renorm(probs.clone().to(DEVICE), limits).cpu()
    assert found.tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0, 0.0], probs[1].tolist()]


def test_equals_at_the_limit_stay_and_zeros_do_not_count(renorm: ModuleType) -> None:
    probs = torch.tensor([[0.4, 0.2, 0.2, 0.2, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    found = renorm.top_k_renorm(probs.clone().to(DEVICE), torch.tensor([2, 3], device=DEVICE)).cpu()
    torch.testing.assert_close(found, probs)
    found = renorm.top_p_renorm(probs.clone().to(DEVICE), torch.tensor([0.5, 0.9], device=DEVICE))
    torch.testing.assert_close(found.cpu(), probs)


def test_no_rows(renorm: ModuleType) -> None:
    empty = torch.empty(0, 5, device=DEVICE)
    assert renorm.top_k_renorm(empty, torch.empty(0, device=DEVICE)).shape == (0, 5)
