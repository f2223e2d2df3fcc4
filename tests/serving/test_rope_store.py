"""Norms, rotation and store against float64: on the device, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from triton_testing import CUDA, DEVICE, triton_module

pytest.importorskip("triton", reason="triton has no build for this platform")

# The interpreter cuts digits of bfloat16 off where a device rounds.
DTYPES = (torch.bfloat16, torch.float16) if CUDA else (torch.float16,)
SLOTS, POSITIONS, EPS = 40, 50, 1e-5


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with triton_module("serving.kernels.rope_store") as module:
        yield module


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rounded to the type of the weight, and given in float64."""
    x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    return x.to(weight.dtype).double()


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] by the tables [T, D] of their tokens."""
    cos, sin = cos_sin.double().unsqueeze(1).chunk(2, -1)
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"), [(8, 8, 2, 64), (7, 5, 1, 128), (1, 3, 3, 32)]
)
def test_matches_float64(
    kernels: ModuleType,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    normed: bool,
    dtype: torch.dtype,
) -> None:
    g = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(DEVICE, dtype)

    # Rows with gaps, as a product with padding gives them.
    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim + 16)[:, :-16]
    shape = (SLOTS, 2, kv_heads, head_dim)
    pools = [torch.full(shape, 7.0, dtype=dtype, device=DEVICE)[:, 1] for _ in range(2)]
    slots = torch.randperm(SLOTS, generator=g)[:tokens].to(DEVICE)
    positions = torch.randint(POSITIONS, (tokens,), generator=g).to(DEVICE)
    cos_sin = torch.randn(POSITIONS, head_dim, generator=g).to(DEVICE)
    norms = (random(head_dim), random(head_dim)) if normed else None
    before = qkv.clone()
    q = kernels.rope_store(
        qkv, *pools, slots, positions, cos_sin, norms=norms, eps=EPS if normed else 0.0
    )
    assert torch.equal(qkv, before) and q.shape == (tokens, heads * head_dim)

    by_head = qkv.double().view(tokens, -1, head_dim)
    queries, keys, values = by_head.split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        queries, keys = rms_norm(queries, norms[0]), rms_norm(keys, norms[1])
    queries, keys = (rotate(x, cos_sin[positions]) for x in (queries, keys))
    # A unit in the last place of the normed value, rotated, and half a unit of the result.
    unit = torch.finfo(dtype).eps
    for got, wanted in ((q.view_as(queries), queries), (pools[0][slots], keys)):
        torch.testing.assert_close(got.double(), wanted, rtol=2 * unit, atol=6 * unit)
    assert torch.equal(pools[1][slots].double(), values)
    untouched = torch.ones(SLOTS, dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    for pool in pools:
        assert (pool[untouched] == 7.0).all()


def test_refusals(kernels: ModuleType) -> None:
    qkv = torch.zeros(2, 4 * 64, dtype=torch.bfloat16)
    pool = torch.zeros(4, 1, 64, dtype=torch.bfloat16)
    cos_sin, norm = torch.zeros(9, 64), torch.ones(64, dtype=torch.bfloat16)
    assert kernels.refusal(qkv, pool, pool, cos_sin, (norm, norm)) == ""
    assert kernels.refusal(qkv, pool, pool, cos_sin, None) == ""
    wide = torch.zeros(4, 1, 96, dtype=torch.bfloat16)
    for why, arguments in {
        "values are torch.float32": (qkv.float(), pool, pool, cos_sin, None),
        "types differ": (qkv, pool.half(), pool, cos_sin, None),
        "another shape": (qkv, pool, pool.repeat(1, 2, 1), cos_sin, None),
        "head size 96": (qkv, wide, wide, cos_sin, None),
        "rotations are": (qkv, pool, pool, cos_sin.bfloat16(), None),
        "part of a head": (qkv, pool, pool, cos_sin[:, :32], None),
        "not contiguous": (qkv.T.contiguous().T, pool, pool, cos_sin, None),
        "norms of another size": (qkv, pool, pool, cos_sin, (norm[:32], norm)),
    }.items():
        assert why in kernels.refusal(*arguments)
    with pytest.raises(ValueError, match="rope_store does not serve this: head size"):
        kernels.rope_store(qkv, wide, wide, torch.arange(2), torch.arange(2), cos_sin)
