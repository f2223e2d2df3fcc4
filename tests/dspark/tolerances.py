"""Tolerances of the numeric tests, by type, with the largest error that was seen."""

from __future__ import annotations

import torch

# (rtol, atol) of single values: elementwise work against float64.
ELEMENTWISE = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (1e-2, 1e-2)}
# Sums over a vocabulary or a hidden size, gradients included.
REDUCTION = {torch.float32: (2e-4, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
# Root mean square of the error over that of the reference. Seen: float32 2e-6, bfloat16 3e-3.
RMS_RATIO = {torch.float32: 2e-5, torch.bfloat16: 8e-3}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, reduction: bool = True) -> None:
    """Compare in float64 with the tolerances of `actual`'s type."""
    rtol, atol = (REDUCTION if reduction else ELEMENTWISE)[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)


def rms_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the error, relative to that of the expected values."""
    error = (actual.double() - expected.double()).pow(2).mean().sqrt()
    scale = expected.double().pow(2).mean().sqrt()
    return float(error / scale.clamp(min=1e-30))


def assert_rms(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """Bound the error's root mean square, which small entries cannot dominate.

    `dtype` is the coarsest type on the way, by default that of `actual`.
    """
    found, allowed = rms_ratio(actual, expected), RMS_RATIO[dtype or actual.dtype]
    assert found <= allowed, f"RMS error ratio {found:.2e} is above {allowed:.0e}"
