"""What the fused objective's closed form promises beyond matching the reference."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import RMS_RATIO, assert_close, assert_rms, rms_ratio

from dspark.objective import ObjectiveConfig, fused_objective, objective_denominators
from dspark.reference import row_terms

ONLY_NLA = {"ce": 0.0, "l1": 0.0, "nla": 1.0}
BLOCK = 5


def problem(blocks: int = 7, *, seed: int = 0, vocab: int = 101) -> dict[str, torch.Tensor]:
    """Arguments of `fused_objective`; block 1 has no label, the others a prefix."""
    g = torch.Generator().manual_seed(seed)
    rows = blocks * BLOCK
    lengths = torch.randint(1, BLOCK + 1, (blocks,), generator=g)
    lengths[1] = 0
    return {
        "hidden_ND": torch.randn(rows, 13, generator=g),
        "features_Nr": torch.randn(rows, 7, generator=g),
        "lm_head_VD": torch.randn(vocab, 13, generator=g) * 0.5,
        "markov_w2_Vr": torch.randn(vocab, 7, generator=g) * 0.3,
        "target_states_UD": torch.randn(11, 13, generator=g),
        "target_index_N": torch.randint(0, 11, (rows,), generator=g),
        "labels_N": torch.randint(0, vocab, (rows,), generator=g),
        "valid_N": (torch.arange(BLOCK) < lengths.unsqueeze(1)).reshape(-1),
        "confidence_logits_N": torch.randn(rows, generator=g),
    }


def loss_and_gradients(arguments, config, **scales):
    arguments = dict(arguments)
    names = ("hidden_ND", "features_Nr", "markov_w2_Vr")
    for name in names:
        arguments[name] = arguments[name].clone().requires_grad_()
    scales = {"term_scale": 1.0, "confidence_scale": 1.0, **scales}
    result = fused_objective(**arguments, block_size=BLOCK, config=config, **scales)
    result.loss.backward()
    return result, [arguments[n].grad for n in names]


def test_nla_keeps_its_slope_where_nothing_overlaps():
    """q(y) is e^-60: 1 - half of the l1 norm is 0 in float32, the sum of minima is not."""
    hidden = torch.tensor([[60.0, 0.0]], requires_grad=True)
    result = fused_objective(
        hidden, None, torch.eye(2), None, torch.tensor([[0.0, 200.0]]),
        torch.tensor([0]), torch.tensor([1]), torch.tensor([True]), None,
        block_size=1, config=ObjectiveConfig(**ONLY_NLA), term_scale=1.0, confidence_scale=1.0,
    )  # fmt: skip
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(60.0, rel=1e-5)
    torch.testing.assert_close(hidden.grad, torch.tensor([[1.0, -1.0]]))


def test_nla_is_alive_at_the_cold_start_where_the_norm_is_not():
    """A uniform draft over 50,000 tokens against a target that is sure of one."""
    vocab = 50_000
    head = torch.zeros(vocab, 2)
    head[7, 1] = 1.0
    slopes = {}
    for name in ("l1", "nla"):
        hidden = torch.zeros(1, 2, requires_grad=True)
        weights = {"ce": 0.0, "l1": 0.0, name: 1.0}
        fused_objective(
            hidden, None, head, None, torch.tensor([[0.0, 40.0]]), torch.tensor([0]),
            torch.tensor([7]), torch.tensor([True]), None, block_size=1,
            config=ObjectiveConfig(**weights), term_scale=1.0, confidence_scale=1.0,
        ).loss.backward()  # fmt: skip
        slopes[name] = float(hidden.grad[0, 1])
    assert slopes["nla"] == pytest.approx(-1.0, rel=1e-3)
    assert slopes["l1"] == pytest.approx(-2.0 / vocab, rel=1e-3)


def test_a_draft_that_equals_the_target_has_nothing_to_learn():
    arguments = problem()
    arguments["markov_w2_Vr"] = torch.zeros_like(arguments["markov_w2_Vr"])
    arguments["target_states_UD"] = arguments["hidden_ND"]
    arguments["target_index_N"] = torch.arange(len(arguments["hidden_ND"]))
    config = ObjectiveConfig(ce=0.0, l1=1.0, nla=1.0, kl=1.0, lk_hybrid=1.0, confidence=0.0)
    result, grads = loss_and_gradients(arguments, config)
    assert abs(float(result.loss.detach())) < 1e-4
    assert all(float(grad.abs().max()) < 1e-5 for grad in grads)


def test_credit_on_nla_is_the_gradient_of_the_expected_accept_length():
    """NLA weighted by R_j has the gradient of -Σ_k Π_{j<=k} alpha_j."""
    arguments = problem()
    arguments["valid_N"] = torch.ones_like(arguments["valid_N"])
    config = ObjectiveConfig(
        **ONLY_NLA, confidence=0.0, position_weights="credit", credit_floor=0.0
    )
    _, (grad, _, _) = loss_and_gradients(arguments, config)
    hidden = arguments["hidden_ND"].double().requires_grad_()
    head, w2 = arguments["lm_head_VD"].double(), arguments["markov_w2_Vr"].double()
    p = torch.softmax(arguments["target_states_UD"].double() @ head.T, -1)
    q = torch.softmax(hidden @ head.T + arguments["features_Nr"].double() @ w2.T, -1)
    alpha = torch.minimum(q, p[arguments["target_index_N"]]).sum(-1).view(-1, BLOCK)
    (-alpha.cumprod(1).sum()).backward()
    assert_rms(grad, hidden.grad)


@pytest.mark.parametrize("weighting", ["decay", "credit"])
def test_a_window_in_parts_gives_the_gradient_of_the_whole(weighting):
    """One division by the window's weight, whatever the sizes of the micro-batches."""
    arguments = problem()
    config = ObjectiveConfig(nla=0.4, position_weights=weighting)
    terms, confidence = objective_denominators(config, arguments["valid_N"].view(-1, BLOCK))
    scales = {"term_scale": 1 / float(terms), "confidence_scale": 1 / float(confidence)}
    whole, (hidden, _, w2) = loss_and_gradients(arguments, config, **scales)
    total_loss, total_w2 = 0.0, torch.zeros_like(w2)
    for rows in (slice(0, 5), slice(5, 20), slice(20, 35)):
        part = {k: v[rows] if k.endswith(("_ND", "_Nr", "_N")) else v for k, v in arguments.items()}
        found, grads = loss_and_gradients(part, config, **scales)
        total_loss += float(found.loss.detach())
        total_w2 += grads[2]
        assert_close(grads[0], hidden[rows])
    assert total_loss == pytest.approx(float(whole.loss.detach()), rel=1e-5)
    assert_close(total_w2, w2)


def test_backward_may_run_twice():
    arguments = problem()
    arguments["hidden_ND"].requires_grad_()
    loss = fused_objective(
        **arguments, block_size=BLOCK, config=ObjectiveConfig(), term_scale=1.0,
        confidence_scale=1.0,
    ).loss  # fmt: skip
    first = torch.autograd.grad(loss, arguments["hidden_ND"], retain_graph=True)[0]
    second = torch.autograd.grad(loss * -2.5, arguments["hidden_ND"])[0]
    assert_close(second, -2.5 * first)


def test_inputs_stay_as_they_were():
    arguments = problem()
    before = {name: value.clone() for name, value in arguments.items()}
    loss_and_gradients(arguments, ObjectiveConfig(kl=0.1, temperature=0.7))
    for name, value in before.items():
        assert torch.equal(arguments[name], value), name


def test_without_gradients_the_loss_is_the_same():
    arguments = problem()
    expected, _ = loss_and_gradients(arguments, ObjectiveConfig(kl=0.1))
    with torch.no_grad():
        found = fused_objective(
            **arguments, block_size=BLOCK, config=ObjectiveConfig(kl=0.1), term_scale=1.0,
            confidence_scale=1.0,
        )  # fmt: skip
    assert not found.loss.requires_grad
    assert torch.equal(found.loss, expected.loss.detach())


def test_nla_metric_and_non_finite_states_show_in_the_loss():
    arguments = problem()
    found, _ = loss_and_gradients(arguments, ObjectiveConfig(**ONLY_NLA, confidence=0.0))
    assert float(found.metrics["nla_sum"]) == pytest.approx(float(found.loss.detach()), rel=1e-5)
    arguments["target_states_UD"][arguments["target_index_N"][0]] = math.nan
    found, _ = loss_and_gradients(arguments, ObjectiveConfig())
    assert not torch.isfinite(found.loss)


@pytest.mark.parametrize("term", ["ce", "l1", "nla", "kl", "lk_hybrid"])
def test_bfloat16_rounds_the_logits_and_little_else(term):
    """Exact arithmetic on the logits that bfloat16 products give, as they are served.

    Against exact logits the slopes of l1 and nla would be off by 5 %: they jump where q = p.
    """
    arguments = problem(vocab=301)
    for name, value in arguments.items():
        if value.is_floating_point() and name != "confidence_logits_N":
            arguments[name] = value.to(torch.bfloat16)
    config = ObjectiveConfig(**{"ce": 0.0, "l1": 0.0, term: 1.0}, confidence=0.0)
    _, grads = loss_and_gradients(arguments, config)
    names = ("hidden_ND", "features_Nr", "markov_w2_Vr")
    leaves = [arguments[name].double().requires_grad_() for name in names]
    hidden, features, w2 = leaves
    head = arguments["lm_head_VD"]
    exact = hidden @ head.double().T + features @ w2.double().T
    rounded = (arguments["hidden_ND"] @ head.T).addmm_(
        arguments["features_Nr"], arguments["markov_w2_Vr"].T
    )
    logits = exact + (rounded.double() - exact).detach()
    target = (arguments["target_states_UD"] @ head.T).double()[arguments["target_index_N"]]
    total = torch.zeros((), dtype=torch.float64)
    for row in torch.nonzero(arguments["valid_N"]).flatten().tolist():
        loss, _, _ = row_terms(logits[row], target[row], int(arguments["labels_N"][row]), config)
        total = total + loss * math.exp(-(row % BLOCK) / config.decay)
    total.backward()
    for name, grad, leaf in zip(names, grads, leaves, strict=True):
        assert grad.dtype == torch.bfloat16
        error = rms_ratio(grad, leaf.grad)
        assert error <= RMS_RATIO[torch.bfloat16], f"{name}: {error:.1e}"
