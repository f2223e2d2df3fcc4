"""Norms with a residual inside the products around them, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F
from triton_testing import CUDA, DEVICE, fill_with_nan, triton_module

pytest.importorskip("triton", reason="triton has no build for this platform")

EPS = 1e-6
WIDTH, INNER, OUT = 104, 264, 72
"""None fits a tile."""
BIT = 2**-8 if CUDA else 2**-7
"""Of bfloat16's mantissa: half a unit, or a whole one where the interpreter cuts digits off."""


class Inputs(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    residual: torch.Tensor
    gain: torch.Tensor
    behind: torch.Tensor
    """The weight of the product behind the norm."""


@pytest.fixture(scope="module")
def skinny() -> Iterator[ModuleType]:
    with triton_module("serving.kernels.skinny_linear") as module:
        yield module


@pytest.fixture(autouse=True)
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_with_nan(monkeypatch)


def make(rows: int, width: int = WIDTH, inner: int = INNER, out: int = OUT) -> Inputs:
    """Rows of very different size, so that one row's norm is no other's."""
    g = torch.Generator().manual_seed(rows)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g)

    size = 4.0 ** torch.arange(-2, rows - 2).clamp(max=3)[:, None]
    made = (
        randn(rows, inner),
        randn(width, inner) / inner**0.5,
        randn(width),
        randn(rows, width) * size,
        1 + 0.3 * randn(width),
        randn(out, width) / width**0.5,
    )
    return Inputs(*(t.to(DEVICE, torch.bfloat16) for t in made))


def reference(given: Inputs, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64: the new residual and the norm's result, where y is the product before, rounded."""
    h = y.double() + given.residual.double()
    rstd = (h.square().mean(1, keepdim=True) + EPS).rsqrt()
    return h, h * rstd * given.gain.double()


def assert_close(got: torch.Tensor, expected: torch.Tensor, bits: float, size: float = 0) -> None:
    allowed = expected.abs() * bits * 1.01 + size + 1e-6
    worst = ((got.double() - expected).abs() / allowed).max()
    assert worst <= 1.0, f"{float(worst):.2f} of what is allowed"


@pytest.mark.parametrize("rows", [1, 5, 8, 16])
@pytest.mark.parametrize(
    "names",
    [
        ("m16n32k64s3w4p1", "m16n32k32s3w4p1"),
        ("m16n16k64s3w2p3", "m16n64k64s3w4p2"),
        ("m16n64k64s4w4p4t", "m16n32k64s3w4p1t"),
    ],
)
def test_a_norm_between_two_products(skinny: ModuleType, rows: int, names: list[str]) -> None:
    first, second = map(skinny.Config.parse, names)
    given = make(rows)
    add = skinny.Add(given.residual, given.gain, EPS)
    for bias in (None, given.bias):
        # Rounded as the same kernel rounds it where nothing follows.
        before = skinny.skinny_linear(given.x, given.weight, bias, config=first)
        h, normed_h = reference(given, before)
        y, normed = skinny.add_linear(given.x, given.weight, bias, add=add, config=first)
        assert_close(normed.h, h, BIT)
        assert_close(y, h * given.gain.double(), BIT)
        assert normed.sums.shape == (first.num_tiles(WIDTH), rows)
        torch.testing.assert_close(
            normed.sums.sum(0).double(), h.square().sum(1), rtol=1e-5, atol=0
        )
        # Each value of y is off by half a unit, the result by another.
        z = skinny.skinny_linear(y, given.behind, config=second, normed=normed)
        expected = normed_h @ given.behind.double().T
        noise = (normed_h.abs() @ given.behind.double().abs().T) * BIT
        assert_close(z, expected, BIT, size=float(noise.max()) + 1e-5)
        error = (z.double() - expected).norm() / expected.norm()
        assert error < (4e-3 if CUDA else 1.2e-2)


@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize("name", ["m8n32k32s3w4p1", "m16n64k64s3w4p2"])
def test_a_gate_behind_a_norm(skinny: ModuleType, rows: int, name: str) -> None:
    given = make(rows)
    add = skinny.Add(given.residual, given.gain, EPS)
    first = skinny.Config.parse("m8n16k64s3w4p2")
    y, normed = skinny.add_linear(given.x, given.weight, add=add, config=first)
    z = skinny.skinny_linear(
        y, given.behind, config=skinny.Config.parse(name), normed=normed, gated=True
    )
    before = skinny.skinny_linear(given.x, given.weight, config=first)
    both = reference(given, before)[1] @ given.behind.double().T
    gate, up = both.bfloat16().double().chunk(2, -1)
    assert z.shape == (rows, OUT // 2)
    error = (z.double() - F.silu(gate) * up).norm() / (F.silu(gate) * up).norm()
    assert error < (1e-2 if CUDA else 2e-2)


def test_a_row_does_not_depend_on_the_others(skinny: ModuleType) -> None:
    given, config = make(8), skinny.Config.parse("m8n32k64s3w4p2")

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        add = skinny.Add(given.residual[rows].clone(), given.gain, EPS)
        y, normed = skinny.add_linear(given.x[rows].clone(), given.weight, add=add, config=config)
        return normed.h, skinny.skinny_linear(y, given.behind, config=config, normed=normed)

    for whole, part in zip(run(slice(0, 8)), run(slice(2, 5)), strict=True):
        assert torch.equal(whole[2:5], part)


def test_the_result_for_what_knows_no_marks(skinny: ModuleType) -> None:
    given = make(5)
    add = skinny.Add(given.residual, given.gain, EPS)
    _, normed = skinny.add_linear(
        given.x, given.weight, add=add, config=skinny.Config.parse("m8n32k64s3w4p1")
    )
    h = normed.h.double()
    expected = (h.square().mean(1, keepdim=True) + EPS).rsqrt()
    # The sums are of h before it was rounded.
    torch.testing.assert_close(normed.rstd().double(), expected, rtol=1e-2, atol=0)


def test_what_is_refused(skinny: ModuleType) -> None:
    given = make(5)
    add = skinny.Add(given.residual, given.gain, EPS)
    first = skinny.Config.parse("m8n32k64s3w4p1")
    y, normed = skinny.add_linear(given.x, given.weight, add=add, config=first)
    assert not skinny.why_not(given.x, given.weight, add=add)
    assert not skinny.why_not(y, given.behind, normed=normed)
    for other, why in (
        (add._replace(residual=given.residual[:4]), "does not fit"),
        (add._replace(residual=given.residual.float()), "another type"),
        (add._replace(gain=given.gain.float()), "another type"),
        (add._replace(gain=given.gain.repeat(2)[1 : WIDTH + 1]), "unaligned"),
        (add._replace(residual=given.residual.T.contiguous().T), "unaligned"),
    ):
        assert why in skinny.why_not(given.x, given.weight, add=other)
    assert "does not fit" in skinny.why_not(given.x, given.weight, None, True, add=add)
    assert "another type" in skinny.why_not(given.x.half(), given.weight.half(), add=add)
    assert "does not fit" in skinny.why_not(y[:3].clone(), given.behind, normed=normed)
    many = normed._replace(sums=torch.zeros(513, 5, device=DEVICE))
    assert "does not fit" in skinny.why_not(y, given.behind, normed=many)
    with pytest.raises(ValueError, match="does not fit"):
        skinny.skinny_linear(y, given.behind, config=first, normed=many)
