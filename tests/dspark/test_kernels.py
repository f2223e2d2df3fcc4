"""The Triton kernels against float64: on the device, or in Triton's interpreter without one."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from tolerances import assert_close, assert_rms
from triton_testing import CUDA, DEVICE, triton_module

from dspark.fused import RowStatistics
from dspark.objective import ObjectiveConfig
from dspark.reference import block_weights, row_terms

pytest.importorskip("triton", reason="triton has no build for this platform")
# The interpreter computes with numpy, which speaks up about the infinities of masked lanes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

BLOCK = 3
TERMS = ("ce", "l1", "nla", "kl", "lk_hybrid")
MIXTURE = ObjectiveConfig(
    ce=0.2, l1=0.5, nla=0.3, kl=0.4, lk_hybrid=0.6, eta=2.0, position_weights="credit", decay=2.5
)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with triton_module("dspark.kernels") as module:
        yield module


@dataclass
class Problem:
    """Arguments of `objective_chunk`."""

    z: torch.Tensor
    u: torch.Tensor
    target: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor

    def run(
        self, kernels: ModuleType, config: ObjectiveConfig, scale: float | torch.Tensor | None
    ) -> tuple[RowStatistics, torch.Tensor]:
        """Statistics and what the logits became, in a copy of them."""
        z = self.z.clone()
        stats = kernels.objective_chunk(
            z, self.u, self.target, self.labels, self.valid, config, scale
        )
        return RowStatistics(*stats), z


def make_problem(
    vocab: int,
    dtype: torch.dtype = torch.float32,
    *,
    lengths: tuple[int, ...] = (3, 0, 1, 2),
    seed: int = 0,
    spread: float = 2.0,
) -> Problem:
    """Blocks with so many valid rows; they share three positions of the target."""
    g = torch.Generator().manual_seed(seed)
    rows = len(lengths) * BLOCK
    return Problem(
        (torch.randn(rows, vocab, generator=g) * spread).to(DEVICE, dtype),
        (torch.randn(3, vocab, generator=g) * spread).to(DEVICE, dtype),
        torch.randint(3, (rows,), generator=g).to(DEVICE),
        torch.randint(vocab, (rows,), generator=g).to(DEVICE),
        (torch.arange(BLOCK) < torch.tensor(lengths).unsqueeze(1)).to(DEVICE),
    )


def test_the_onpolicy_term_equals_its_derivative(kernels: ModuleType) -> None:
    """-Σ W_k α_k, where the probability W_k of getting so far is the draft's too."""
    config = ObjectiveConfig(
        ce=0.0, l1=0.0, accept_onpolicy=0.7, position_weights="credit", temperature=0.8
    )
    x = make_problem(37, lengths=(3, 1, 2, 0), spread=1.0)
    found, gradient = x.run(kernels, config, 1.3)
    z = x.z.double().cpu().requires_grad_()
    q = torch.softmax(z / 0.8, -1)
    p = torch.softmax(x.u.double().cpu() / 0.8, -1)[x.target.cpu()]
    labels = x.labels.cpu().unsqueeze(1)
    valid = x.valid.cpu()
    ratio = (q.gather(1, labels) / p.gather(1, labels)).clamp(max=1.0).view(valid.shape)
    reached = torch.cat([torch.ones(4, 1), ratio[:, :-1]], 1).cumprod(1)
    alpha = torch.minimum(q, p).sum(-1).view(valid.shape)
    loss = -0.7 * (reached * alpha * valid).sum()
    (loss * 1.3).backward()
    assert_close(found.loss(config).sum().cpu(), loss.detach())
    assert_rms(gradient.cpu(), z.grad)


def one_term(term: str, **settings: Any) -> ObjectiveConfig:
    return ObjectiveConfig(**{"ce": 0.0, "l1": 0.0, term: 0.7}, **settings)


def reference(
    x: Problem, config: ObjectiveConfig, scale: float
) -> tuple[RowStatistics, torch.Tensor]:
    """Statistics and the gradient of the scaled loss, float64, by definition and autograd."""
    z = x.z.double().cpu().requires_grad_()
    u, valid = x.u.double().cpu(), x.valid.cpu().flatten()
    target, labels = x.target.tolist(), x.labels.tolist()
    stats = RowStatistics(*torch.zeros(7, len(labels), dtype=torch.float64))
    total = z[:0].sum()
    for start in range(0, len(labels), BLOCK):
        counting = {k: start + k for k in range(BLOCK) if valid[start + k]}
        rows = {
            k: row_terms(z[row], u[target[row]], labels[row], config) for k, row in counting.items()
        }
        weights = block_weights(rows, BLOCK, config)
        reached = 1.0
        for k, row in counting.items():
            loss, stats.alpha[row], stats.label_q[row] = rows[k]
            total = total + weights[k] * loss
            log_q = torch.log_softmax(z[row].detach() / config.temperature, -1)
            log_p = torch.log_softmax(u[target[row]] / config.temperature, -1)
            stats.ce[row] = -log_q[labels[row]]
            if config.kl > 0.0 or config.lk_hybrid > 0.0:
                stats.kl[row] = (log_p.exp() * (log_p - log_q)).sum()
            stats.hit[row] = float(int(z[row].argmax()) == labels[row])
            stats.weight[row] = weights[k]
            stats.prefix[row] = reached
            ratio = (log_q - log_p)[labels[row]].exp().clamp(max=1.0)
            reached = reached * float(ratio)
    (total * scale).backward()
    assert z.grad is not None, "the loss depends on the logits"
    return stats, z.grad


def compare(kernels: ModuleType, x: Problem, config: ObjectiveConfig, scale: float = 1.0) -> None:
    found, gradient = x.run(kernels, config, scale)
    wanted, wanted_gradient = reference(x, config, scale)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_close(ours.cpu(), theirs)
    if x.z.shape[1] > 1:
        assert_rms(gradient.cpu(), wanted_gradient)
    # With one token there is nothing to learn, and no size to compare an error with.
    assert_close(gradient.cpu(), wanted_gradient)
    assert not gradient[~x.valid.flatten()].any()


def poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill whatever is allocated without a value."""

    def poisoned(maker: Any) -> Any:
        def make(*args: Any, **settings: Any) -> torch.Tensor:
            made = maker(*args, **settings)
            return made.fill_(math.nan if made.is_floating_point() else 2**40)

        return make

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


# --- the chunk -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighting", ["decay", "credit", "dpace"])
@pytest.mark.parametrize("term", TERMS)
def test_each_term_equals_the_reference(
    kernels: ModuleType, term: str, weighting: str, dtype: torch.dtype
) -> None:
    compare(kernels, make_problem(61, dtype), one_term(term, position_weights=weighting), 0.37)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab", "temperature"), [(1, 2.0), (7, 0.5), (1000, 2.0), (4097, 0.5), (50_001, 1.0)]
)
def test_vocabularies_that_fill_no_tile(
    kernels: ModuleType, vocab: int, temperature: float, dtype: torch.dtype
) -> None:
    config = dataclasses.replace(MIXTURE, temperature=temperature)
    compare(kernels, make_problem(vocab, dtype, lengths=(2, 1)), config, 3.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [63, 64, 65])
def test_rows_of_several_tiles(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, vocab: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(kernels, "TILE", 16)
    compare(kernels, make_problem(vocab, dtype, seed=1), MIXTURE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_extreme_logits(kernels: ModuleType, temperature: float, dtype: torch.dtype) -> None:
    """Logits of +-80, and drafts and targets that are sure of a token: of one, or of different."""
    x = make_problem(33, dtype, lengths=(3, 3))
    x.z[:2] = torch.where(x.z[:2] > 0, 80.0, -80.0).to(dtype)
    # The others stay apart: the gradient jumps where q = p. Any surer, and alpha, the sum of what
    # neither is sure of, would be below MIN_ALPHA.
    x.z[2:5, 4] = x.u[0, 4] = x.u[1, 9] = 70.0 * temperature
    x.target[2:4] = torch.tensor([0, 1])
    x.labels[2:4] = torch.tensor([4, 9])
    config = dataclasses.replace(MIXTURE, temperature=temperature)
    found, gradient = x.run(kernels, config, 1.0)
    wanted, wanted_gradient = reference(x, config, 1.0)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_close(ours.cpu(), theirs)
    assert_close(gradient.cpu(), wanted_gradient)


def test_a_draft_that_equals_the_target_has_nothing_to_learn(kernels: ModuleType) -> None:
    x = make_problem(1000, lengths=(3, 3, 3, 3))
    x.u, x.target = x.z, torch.arange(12, device=DEVICE)
    config = dataclasses.replace(MIXTURE, ce=0.0)
    found, gradient = x.run(kernels, config, 1.0)
    # alpha must not exceed 1 by what its sum rounds up.
    assert float(found.alpha.min()) > 1.0 - 1e-5 and float(found.alpha.max()) <= 1.0
    assert float(found.loss(config).abs().max()) < 1e-4
    assert float(gradient.abs().max()) < 1e-5


def test_nla_is_alive_where_nothing_overlaps(kernels: ModuleType) -> None:
    """q of the target's token is e^-60: 1 - half of the l1 norm would be 0 in float32."""
    x = make_problem(2, lengths=(1,))
    x.z[0] = torch.tensor([60.0, 0.0])
    x.u[:] = torch.tensor([0.0, 200.0])
    x.labels[0] = 1
    config = one_term("nla")
    found, gradient = x.run(kernels, config, 1.0)
    assert float(found.nla[0]) == pytest.approx(60.0, rel=1e-5)
    assert gradient[0].tolist() == pytest.approx([0.7, -0.7], rel=1e-5)


# --- rows that do not count ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_rows_are_neither_read_nor_kept(kernels: ModuleType, dtype: torch.dtype) -> None:
    """NaN or infinite logits, labels and positions far outside: every other bit stays."""
    x = make_problem(61, dtype)
    found, gradient = x.run(kernels, MIXTURE, 1.0)
    masked = ~x.valid.flatten()
    x.z[masked] = math.nan
    x.z[masked, ::2] = math.inf
    x.labels[masked] = -(10**12)
    x.target[masked] = 10**12
    # Nor does a target row that no valid row asks for.
    x.u = torch.cat([x.u, torch.full_like(x.u, math.nan)])
    dirty, dirty_gradient = x.run(kernels, MIXTURE, 1.0)
    assert torch.equal(torch.stack(found), torch.stack(dirty))
    assert torch.equal(gradient, dirty_gradient)
    assert not torch.stack(dirty)[:, masked].any() and not dirty_gradient[masked].any()


@pytest.mark.parametrize("weighting", ["decay", "credit", "dpace"])
def test_nothing_valid_gives_zeros(kernels: ModuleType, weighting: str) -> None:
    x = make_problem(61, lengths=(0, 0))
    x.z[:] = math.nan
    config = dataclasses.replace(MIXTURE, position_weights=weighting)
    found, gradient = x.run(kernels, config, 1.0)
    assert not torch.stack(found).any() and not gradient.any()


def test_no_rows_at_all(kernels: ModuleType) -> None:
    found, gradient = make_problem(61, lengths=()).run(kernels, MIXTURE, 1.0)
    assert torch.stack(found).shape == (7, 0) and gradient.shape == (0, 61)


def test_fresh_memory_is_never_read(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_problem(61)
    expected, expected_gradient = x.run(kernels, MIXTURE, 1.0)
    poison_fresh_memory(monkeypatch)
    found, gradient = x.run(kernels, MIXTURE, 1.0)
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert torch.equal(gradient, expected_gradient)


# --- what goes in and out ------------------------------------------------------------------------


def test_scales(kernels: ModuleType) -> None:
    """A number and a tensor say the same; None leaves the logits as they are."""
    x = make_problem(61)
    _, by_number = x.run(kernels, MIXTURE, 0.25)
    _, by_tensor = x.run(kernels, MIXTURE, torch.tensor(0.25, device=DEVICE))
    _, unscaled = x.run(kernels, MIXTURE, 1.0)
    _, kept = x.run(kernels, MIXTURE, None)
    assert torch.equal(by_number, by_tensor)
    assert torch.equal(by_number, unscaled * 0.25)
    assert torch.equal(kept, x.z)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_with_wider_rows(kernels: ModuleType, dtype: torch.dtype) -> None:
    x = make_problem(61, dtype)
    expected = kernels.objective_chunk(
        (z := x.z.clone()), x.u, x.target, x.labels, x.valid, MIXTURE, 1.0
    )
    wide_z = torch.full((x.z.shape[0], 83), math.nan, device=DEVICE, dtype=dtype)
    wide_u = torch.full((x.u.shape[0], 64), math.nan, device=DEVICE, dtype=dtype)
    wide_z[:, 5:66], wide_u[:, :61] = x.z, x.u
    view = wide_z[:, 5:66]
    found = kernels.objective_chunk(view, wide_u[:, :61], x.target, x.labels, x.valid, MIXTURE, 1.0)
    assert_close(found, expected)
    assert_close(view, z)
    assert wide_z[:, :5].isnan().all() and wide_z[:, 66:].isnan().all()


def test_rows_that_are_not_contiguous_are_refused(kernels: ModuleType) -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        kernels.row_lse(torch.zeros(5, 4, device=DEVICE).t(), 1.0)


@pytest.mark.parametrize("where", ["draft", "target"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("term", TERMS)
def test_logits_that_are_not_finite_show(
    kernels: ModuleType, term: str, value: float, where: str
) -> None:
    x = make_problem(61)
    if where == "draft":
        x.z[0, 7] = value
    else:
        x.u[x.target[0], 7] = value
    config = one_term(term)
    found, _ = x.run(kernels, config, 1.0)
    if (term, where) != ("ce", "target"):
        assert not torch.isfinite(found.loss(config).sum())


# --- the parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_row_lse(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, temperature: float, dtype: torch.dtype
) -> None:
    poison_fresh_memory(monkeypatch)
    x = make_problem(1000, dtype, lengths=(1, 1))
    # Where no logit is near 0, nothing may be measured from there.
    x.z[0] -= 300.0
    valid = x.valid.flatten()
    lse, argmax = kernels.row_lse(x.z, temperature, valid_R=valid)
    assert lse.dtype == torch.float32 and argmax.dtype == torch.int64
    wanted = torch.logsumexp(x.z.double() / temperature, -1)
    assert_close(lse[valid], wanted[valid], reduction=False)
    assert torch.equal(argmax[valid], x.z.float().argmax(-1)[valid])
    assert not lse[~valid].any() and not argmax[~valid].any()
    every, none = kernels.row_lse(x.z, temperature, with_argmax=False)
    assert none is None
    assert_close(every, wanted, reduction=False)


@pytest.mark.parametrize(
    "places",
    [(0, 1), (3, 4), (15, 16), (5, 37), (38, 21), (99, 2, 50), (64, 63), tuple(range(100))],
)
def test_argmax_is_the_first_of_equals(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, places: tuple[int, ...]
) -> None:
    monkeypatch.setattr(kernels, "TILE", 32)
    for dtype in DTYPES:
        logits = torch.full((1, 100), -3.0, device=DEVICE, dtype=dtype)
        logits[0, list(places)] = -1.0
        _, argmax = kernels.row_lse(logits, 0.7)
        assert argmax.tolist() == [min(places)]


def test_vocabulary_masked_by_infinity(kernels: ModuleType) -> None:
    """Logits of -inf, and of the lowest number, have probability 0 on both sides."""
    x = make_problem(61, lengths=(3,))
    x.labels[:] = 3
    for lowest in (-math.inf, torch.finfo(torch.float32).min):
        x.z[:, 10:40] = lowest
        x.u[:, 10:40] = lowest
        found, gradient = x.run(kernels, MIXTURE, 1.0)
        keep = [*range(10), *range(40, 61)]
        short = dataclasses.replace(x, z=x.z[:, keep], u=x.u[:, keep])
        wanted, wanted_gradient = short.run(kernels, MIXTURE, 1.0)
        assert_close(torch.stack(found), torch.stack(wanted))
        assert_close(gradient[:, keep], wanted_gradient)
        assert not gradient[:, 10:40].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_overlap(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    poison_fresh_memory(monkeypatch)
    x, temperature = make_problem(200, dtype), 0.7
    valid = x.valid.flatten()
    lse_z, _ = kernels.row_lse(x.z, temperature)
    lse_u, _ = kernels.row_lse(x.u, temperature)
    rows = (x.z, lse_z, x.u, lse_u, x.target, x.labels, valid, temperature)
    found = kernels.row_overlap(*rows, need_kl=True)
    log_q = torch.log_softmax(x.z.double() / temperature, -1)
    log_p = torch.log_softmax(x.u.double() / temperature, -1)[x.target]
    q, p = log_q.exp(), log_p.exp()
    wanted = (
        torch.minimum(q, p).sum(-1),
        torch.where(q < p, q, 0.0).sum(-1),
        (p * (log_p - log_q)).sum(-1),
        log_q.gather(1, x.labels.unsqueeze(1)).squeeze(1),
        log_p.gather(1, x.labels.unsqueeze(1)).squeeze(1),
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert_close(ours, theirs * valid)
    assert not kernels.row_overlap(*rows, need_kl=False)[2].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_logit_gradient_is_the_sum_of_four(kernels: ModuleType, dtype: torch.dtype) -> None:
    x = make_problem(200, dtype)
    valid = x.valid.flatten()
    lse_z, _ = kernels.row_lse(x.z, 1.0)
    lse_u, _ = kernels.row_lse(x.u, 1.0)
    q = torch.softmax(x.z.double(), -1)
    p = torch.softmax(x.u.double(), -1)[x.target]
    label = torch.nn.functional.one_hot(x.labels, 200).double()
    parts = (q, -torch.where(q < p, q, 0.0), -p, -label)
    for chosen in ((0,), (1,), (2,), (3,), (0, 1, 2, 3)):
        coefficients = torch.zeros(4, len(valid), device=DEVICE)
        for part in chosen:
            coefficients[part] = torch.linspace(-1.0, 2.0, len(valid)) + part
        wanted = sum(coefficients[k].double().unsqueeze(1) * parts[k] for k in range(4))
        z = x.z.clone()
        kernels.logit_gradient_(z, lse_z, x.u, lse_u, x.target, x.labels, valid, 1.0, coefficients)
        assert_rms(z, wanted * valid.unsqueeze(1))


def test_the_module_imports_without_device_and_interpreter() -> None:
    assert callable(importlib.import_module("dspark.kernels").objective_chunk)


# --- the device ----------------------------------------------------------------------------------


@pytest.mark.skipif(not CUDA, reason="needs CUDA: the interpreter never waits for a device")
def test_the_host_waits_for_nothing(kernels: ModuleType) -> None:
    scale = torch.tensor(0.5, device=DEVICE)
    for weighting in ("decay", "credit", "dpace"):
        x = make_problem(61)
        config = dataclasses.replace(MIXTURE, position_weights=weighting)
        x.run(kernels, config, scale)
        torch.cuda.set_sync_debug_mode("error")
        try:
            x.run(kernels, config, scale)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(
    not CUDA or torch.cuda.mem_get_info()[0] < 10 * 2**30,
    reason="needs CUDA with 10 GiB free: rows more than 2^31 elements apart, of draft and target",
)
def test_offsets_beyond_int32(kernels: ModuleType) -> None:
    """Row 2 starts 2^31 elements after row 0, at strides that fit 32 bits."""
    vocab, stride = 262_144, 2**30
    x = make_problem(vocab, torch.bfloat16, lengths=(3,))
    x.target = torch.tensor([2, 0, 2], device=DEVICE)
    expected, expected_gradient = x.run(kernels, MIXTURE, 1.0)

    def spread(rows: torch.Tensor) -> torch.Tensor:
        storage = torch.empty(2 * stride + vocab, dtype=rows.dtype, device=DEVICE)
        return storage.as_strided((3, vocab), (stride, 1)).copy_(rows)

    z = spread(x.z)
    stats = kernels.objective_chunk(z, spread(x.u), x.target, x.labels, x.valid, MIXTURE, 1.0)
    assert torch.equal(stats, torch.stack(expected))
    assert torch.equal(z, expected_gradient)
