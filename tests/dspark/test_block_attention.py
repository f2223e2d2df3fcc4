"""The attention kernels against float64: on the device, or in Triton's interpreter without one."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from draft_testing import random_draft, tiny_config
from tolerances import assert_close, assert_rms
from triton_testing import CUDA, DEVICE, copy_module, triton_module

from dspark.attention import ContextBounds, attend, attention_mask, block_attention, context_mask

pytest.importorskip("triton", reason="triton has no build for this platform")
# Where a row does not see a key, the interpreter's exponential may overflow; it is not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

# The interpreter multiplies the bit patterns of bfloat16.
DTYPES = (torch.float32, torch.bfloat16 if CUDA else torch.float16)
CASES = {
    # slots, block size, heads, heads of keys, head size, anchors of each sequence as (start, end)
    "one document": (90, 7, 4, 2, 16, [[(0, p) for p in (1, 3, 5, 30, 64, 70, 89)]]),
    "no group": (70, 5, 2, 2, 16, [[(0, p) for p in range(3, 70, 6)]]),
    "group of four": (
        60,
        5,
        4,
        1,
        16,
        [[(0, p) for p in (1, 3, 30, 44, 60)], [(0, 9), (10, 13), *[(10, 50)] * 2, (0, 0)]],
    ),
    "group of eight": (70, 3, 8, 1, 16, [[(0, p) for p in range(5, 70, 4)]]),
    "group larger than a tile": (20, 2, 40, 1, 16, [[(0, 3), (0, 17), (0, 20)]]),
    "group of three, odd head": (40, 4, 3, 1, 20, [[(0, p) for p in range(2, 40, 5)]]),
    "packed": (
        100,
        7,
        4,
        1,
        16,
        [[(0, 5), (0, 29), (30, 33), (30, 64), (30, 79), (80, 81), (80, 99)]],
    ),
    "no context": (33, 5, 2, 1, 16, [[(0, 0), (0, 4), (10, 10), (10, 30), (32, 32)]]),
    "absent anchors": (64, 6, 2, 1, 16, [[(0, 17), (0, 64), *[(0, 0)] * 7]]),
    "nothing but blocks": (20, 4, 2, 1, 16, [[(0, 0)] * 3]),
    "out of order": (80, 5, 2, 1, 16, [[(0, p) for p in (70, 3, 80, 0, 33, 12, 79, 64)]]),
    "documents out of order": (96, 3, 4, 2, 16, [[(50, 90), (0, 40), (50, 51), (0, 96), (7, 60)]]),
    "sequences differ": (
        64,
        16,
        2,
        1,
        16,
        [[(0, 60), (0, 61), (0, 62)], [(0, 3), (0, 0), (20, 44)]],
    ),
    "one row a block": (50, 1, 2, 2, 16, [[(0, p) for p in range(50)]]),
    "one anchor": (5, 7, 2, 1, 16, [[(0, 5)]]),
}


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch, triton_module("dspark.block_kernels") as inner:
        # The launchers look up the kernels by this name, and the operators the launchers.
        patch.setitem(sys.modules, "dspark.block_kernels", inner)
        name = "dspark.block_attention"
        module = importlib.import_module(name) if CUDA else copy_module(name, patch)
        patch.setitem(sys.modules, name, module)
        if not CUDA:
            # Small, so that a few anchors make several tiles of each kind.
            use_tilings(
                module,
                patch,
                module.Tilings(
                    module.Tiling(16, 32, 16, 4, 1),
                    module.Tiling(32, 16, 16, 4, 1),
                    module.Tiling(16, 32, 0, 4, 1),
                    module.Tiling(32, 16, 0, 4, 1),
                ),
            )
        yield module


def use_tilings(module: ModuleType, patch: pytest.MonkeyPatch, tilings: Any) -> None:
    patch.setattr(module, "SMALL_TILINGS", tilings)
    patch.setattr(module, "TILINGS", {max(module.TILINGS): tilings})


@dataclass
class Problem:
    """Arguments of the operator and the gradient of its output."""

    inputs: list[torch.Tensor]
    bounds: ContextBounds
    upstream: torch.Tensor

    def found(self) -> tuple[torch.Tensor, ...]:
        """The attention and its gradients."""
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        out, _ = block_attention(*leaves, *self.bounds)
        return out.detach(), *torch.autograd.grad(out, leaves, self.upstream)

    def expected(self) -> tuple[torch.Tensor, ...]:
        """The same in float64 by a dense mask."""
        leaves = [x.detach().double().requires_grad_() for x in self.inputs]
        slots, rows = leaves[1].shape[2], leaves[0].shape[2]
        seen = context_mask(*self.bounds, slots)
        mask = attention_mask(seen, rows // seen.shape[1])
        out = attend(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), mask)
        return out.detach(), *torch.autograd.grad(out, leaves, self.upstream.double())


def make_problem(
    case: tuple[Any, ...], dtype: torch.dtype, *, seed: int = 0, spread: float = 1.0
) -> Problem:
    slots, block, heads, kv_heads, width, sequences = case
    g = torch.Generator().manual_seed(seed)
    places = torch.tensor(sequences, device=DEVICE)
    batch, anchors = places.shape[:2]
    rows = anchors * block

    def random(num_heads: int, length: int) -> torch.Tensor:
        # As the model makes them: the heads of a position side by side.
        made = torch.randn(batch, length, num_heads, width, generator=g) * spread
        return made.to(DEVICE, dtype).transpose(1, 2)

    inputs = [random(heads, rows), *(random(kv_heads, n) for n in (slots, slots, rows, rows))]
    bounds = ContextBounds(places[:, :, 0].contiguous(), places[:, :, 1].contiguous())
    return Problem(inputs, bounds, 0.3 * random(heads, rows))


def poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill whatever is allocated without a value."""

    def poisoned(maker: Any) -> Any:
        def make(*args: Any, **settings: Any) -> torch.Tensor:
            made = maker(*args, **settings)
            return made.fill_(math.nan) if made.is_floating_point() else made

        return make

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_and_gradients(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, case: tuple[Any, ...], dtype: torch.dtype
) -> None:
    x = make_problem(case, dtype)
    expected = x.expected()
    poison_fresh_memory(monkeypatch)
    for ours, theirs in zip(x.found(), expected, strict=True):
        assert ours.dtype == dtype
        if theirs.any():
            assert_rms(ours, theirs, torch.bfloat16 if dtype == torch.float16 else dtype)
        else:
            # No row sees a context slot.
            assert not ours.any()


@pytest.mark.parametrize("name", ["group of four", "group of eight"])
def test_tiles_by_the_copy_engine(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Those of a device that has none, and of queries that it cannot fetch, are the same."""
    x = make_problem(CASES[name], DTYPES[1])
    results = []
    for has in (False, True):
        monkeypatch.setattr(kernels, "has_copy_engine", lambda _, has=has: has)
        results.append(x.found())
    for plain, copied in zip(*results, strict=True):
        assert_rms(copied, plain.double(), torch.bfloat16)


def test_large_scores(kernels: ModuleType) -> None:
    """Far beyond what float32's exponential takes; what is not seen has the largest ones."""
    x = make_problem(CASES["packed"], torch.float32, spread=12.0)
    for ours, theirs in zip(x.found(), x.expected(), strict=True):
        assert torch.isfinite(ours).all()
        assert_rms(ours, theirs, torch.bfloat16)


@pytest.mark.parametrize("kind", ["contiguous", "wider rows", "head size outside"])
def test_any_strides(kernels: ModuleType, kind: str) -> None:
    x = make_problem(CASES["sequences differ"], torch.float32)
    expected = x.found()

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        if kind == "contiguous":
            return tensor.contiguous()
        if kind == "wider rows":
            wide = torch.full((*tensor.shape[:3], 48), math.nan, device=DEVICE)
            wide[..., 16:32] = tensor
            return wide[..., 16:32]
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)

    x.inputs = [laid_out(tensor) for tensor in x.inputs]
    x.upstream = laid_out(x.upstream)
    for ours, theirs in zip(x.found(), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert x.found()[0].stride(1) == 16


def test_expanded_upstream_gradient(kernels: ModuleType) -> None:
    x = make_problem(CASES["one document"], torch.float32)
    x.upstream = torch.tensor(0.7, device=DEVICE).expand(x.upstream.shape)
    for ours, theirs in zip(x.found(), x.expected(), strict=True):
        assert_close(ours, theirs)


def test_what_is_not_seen_has_no_part(kernels: ModuleType) -> None:
    """Another block's keys and later slots leave a row as it is, exactly."""
    x = make_problem(CASES["one document"], torch.float32)
    before = x.found()[0]
    x.inputs[1][:, :, 30:] += 1.0
    x.inputs[4][:, :, 14:] -= 1.0
    after = x.found()[0]
    assert torch.equal(before[:, :, :14], after[:, :, :14])
    assert not torch.equal(before[:, :, 28:], after[:, :, 28:])


def test_the_same_every_time(kernels: ModuleType) -> None:
    x = make_problem(CASES["packed"], DTYPES[1])
    for once, again in zip(x.found(), x.found(), strict=True):
        assert torch.equal(once, again)


def test_the_operator_keeps_its_promises(kernels: ModuleType) -> None:
    x = make_problem(CASES["sequences differ"], torch.float32)
    leaves = [tensor.requires_grad_() for tensor in x.inputs]
    torch.library.opcheck(block_attention, (*leaves, *x.bounds), rtol=1e-4, atol=1e-5)


def test_a_compiled_draft_equals_the_dense_one(kernels: ModuleType) -> None:
    """One graph, whose gradients are those of the dense mask."""
    config = tiny_config()
    draft = random_draft(config).to(DEVICE)
    g = torch.Generator().manual_seed(3)
    states = torch.randn(2, 20, config.num_context_features, generator=g).to(DEVICE)
    bounds = ContextBounds(
        torch.tensor([[0, 0, 8], [0, 0, 0]], device=DEVICE),
        torch.tensor([[3, 7, 19], [0, 12, 20]], device=DEVICE),
    )
    embeds = torch.randn(2, 3, config.block_size, config.hidden_size, generator=g).to(DEVICE)
    positions = torch.arange(20, device=DEVICE).expand(2, 20)

    def run(visible: Any) -> torch.Tensor:
        context = draft.context_kv(states, positions)
        return draft.forward_blocks(embeds, bounds.end_BA, context, visible)

    results = []
    for visible, function in (
        (context_mask(*bounds, 20), run),
        (bounds, torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=False)),
    ):
        hidden = function(visible)
        grads = torch.autograd.grad(hidden.square().sum(), list(draft.layers.parameters()))
        results.append((hidden.detach(), *grads))
    for dense, ours in zip(*results, strict=True):
        assert_rms(ours, dense)


def test_tilings_by_head_size(kernels: ModuleType) -> None:
    assert kernels.pick_tilings(64, torch.float32) is kernels.SMALL_TILINGS
    largest = kernels.TILINGS[max(kernels.TILINGS)]
    assert kernels.pick_tilings(200, torch.bfloat16) is largest


# --- the device ----------------------------------------------------------------------------------


def spread_anchors(slots: int, anchors: int) -> list[tuple[int, int]]:
    return [(0, slots * (a + 1) // anchors) for a in range(anchors)]


@pytest.mark.skipif(not CUDA, reason="needs CUDA: tiles of the tables are slow to interpret")
@pytest.mark.parametrize(
    ("width", "heads", "block"),
    [
        (128, (32, 8), 7),
        (128, (8, 8), 16),
        (64, (8, 1), 7),
        (64, (8, 2), 16),
        (80, (6, 2), 7),
        (256, (8, 2), 7),
    ],
)
def test_tilings_of_the_tables(
    kernels: ModuleType, width: int, heads: tuple[int, int], block: int
) -> None:
    one = spread_anchors(2001, 90)
    two = [(0, 37 * a) for a in range(1, 30)] + [(1100, 1100 + 31 * a) for a in range(29)]
    x = make_problem((2001, block, *heads, width, [one, two + [(0, 0)] * 32]), torch.bfloat16)
    for ours, theirs in zip(x.found(), x.expected(), strict=True):
        assert_rms(ours, theirs)


@pytest.mark.skipif(not CUDA, reason="needs CUDA: the interpreter never waits for a device")
def test_the_host_waits_for_nothing(kernels: ModuleType) -> None:
    x = make_problem(CASES["packed"], torch.bfloat16)
    x.found()
    torch.cuda.set_sync_debug_mode("error")
    try:
        x.found()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(
    not CUDA or torch.cuda.mem_get_info()[0] < 40 * 2**30,
    reason="needs CUDA with 40 GiB free: keys more than 2^31 elements apart",
)
def test_offsets_beyond_int32(kernels: ModuleType) -> None:
    """Strides that fit 32 bits, tiles and sequences that lie further apart than that."""
    case = (4096, 7, 4, 1, 64, [spread_anchors(4096, 64)] * 2)
    x = make_problem(case, torch.bfloat16)
    expected = x.found()

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        heads, length, width = tensor.shape[1:]
        stride = -(-(2**31 + 2**20) // length) // 16 * 16 + 16
        storage = torch.empty(length * stride + 2 * width, dtype=tensor.dtype, device=DEVICE)
        strides = (width * heads, width, stride, 1)
        return storage.as_strided(tensor.shape, strides).copy_(tensor)

    for place in (0, 1, 4):
        moved = list(x.inputs)
        moved[place] = apart(moved[place])
        found = Problem(moved, x.bounds, x.upstream).found()
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        del moved, found
