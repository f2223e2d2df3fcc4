"""The evaluator: its reports, its process role, and the check that a draft is lossless."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import splitserve.eval.measure as measure
from dspark.checkpoint import save_draft
from dspark.config import DraftConfig
from dspark.decoder import EmbeddedDecoder
from dspark.model import DSparkDraft
from dspark.report import AcceptReport
from splitserve.eval.measure import check_lossless, evaluate_draft, lossless_differences
from splitserve.eval.spec import EvalPrompt, EvaluatorSpec
from splitserve.eval.worker import run
from splitserve.messages import Evaluate, Evaluated, EvaluatorReady, Stop

VOCAB = 29


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_draft(target: Path, folder: Path, layer_ids: tuple[int, ...]) -> str:
    config = DraftConfig.for_target(
        LlamaConfig.from_pretrained(target).to_dict(),
        num_layers=1,
        block_size=3,
        mask_token_id=2,
        markov_rank=4,
        target_layer_ids=layer_ids,
    )
    save_draft(folder, config, DSparkDraft(config).state_dict())
    return str(folder)


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_draft(target, tmp_path_factory.mktemp("draft") / "draft", (0, 2))


@pytest.fixture
def spec(target: Path) -> EvaluatorSpec:
    generator = torch.Generator().manual_seed(0)
    prompts = tuple(
        EvalPrompt(
            f"p{i}",
            "even" if i % 2 == 0 else "odd",
            tuple(torch.randint(4, VOCAB, (3 + i,), generator=generator).tolist()),
        )
        for i in range(5)
    )
    return EvaluatorSpec(
        target_path=str(target),
        dtype="float32",
        prompts=prompts,
        eos_token_ids=(3,),
        max_new_tokens=12,
        batch_size=2,
        temperatures=(0.0,),
        final_temperatures=(0.0, 1.0),
        seed=0,
        num_threads=1,
    )


class FakeChannel:
    """Hands out messages and keeps the answers."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages, self.sent, self.state = messages, [], ""

    def receive(self) -> Any:
        return self.messages.pop(0)

    def send(self, message: Any) -> None:
        self.sent.append(message)


def counts(report: dict[str, Any]) -> dict[str, Any]:
    """Without the times, which differ from run to run."""
    return {"full": report["full"], "reports": [r["domains"] for r in report["reports"]]}


def test_a_report_per_temperature_with_every_domain(spec: EvaluatorSpec, draft: str) -> None:
    assert [
        r["settings"]["temperature"] for r in evaluate_draft(spec, draft, False)["reports"]
    ] == [0.0]
    full = evaluate_draft(spec, draft, True)
    greedy, sampled = full["reports"]
    assert greedy["settings"]["rule"] == "greedy"
    assert sampled["settings"]["rule"] == "token-by-token rejection sampling"
    for report in full["reports"]:
        domains = report["domains"]
        assert set(domains) == {"all", "even", "odd"}
        assert [domains[n]["num_requests"] for n in ("even", "odd", "all")] == [3, 2, 5]
        assert AcceptReport.from_dict(report).to_dict() == report
        assert report["timings"]["verify_seconds"] > 0.0


def test_a_measurement_repeats_itself_whatever_the_batch_size(
    spec: EvaluatorSpec, draft: str
) -> None:
    wanted = counts(evaluate_draft(spec, draft, True))
    assert counts(evaluate_draft(spec, draft, True)) == wanted
    assert counts(evaluate_draft(replace(spec, batch_size=5), draft, True)) == wanted


def test_the_role_answers_every_evaluate_and_stops(spec: EvaluatorSpec, draft: str) -> None:
    channel = FakeChannel([Evaluate(4, draft, False), Evaluate(8, draft, True), Stop()])
    run(channel, spec)
    ready, first, second = channel.sent
    assert ready == EvaluatorReady()
    assert isinstance(first, Evaluated) and isinstance(second, Evaluated)
    assert (first.step, len(first.report["reports"])) == (4, 1)
    assert (second.step, len(second.report["reports"])) == (8, 2)
    assert second.report["reports"][0]["settings"]["draft_step"] == 8
    assert counts(second.report) == counts(evaluate_draft(spec, draft, True))


def test_a_draft_of_other_layers_is_measured_with_the_same_target(
    spec: EvaluatorSpec, target: Path, draft: str, tmp_path: Path
) -> None:
    other = write_draft(target, tmp_path / "other", (1,))
    channel = FakeChannel([Evaluate(s, d, False) for s, d in enumerate([draft, other, draft])])
    channel.messages.append(Stop())
    run(channel, spec)
    _, first, second, third = channel.sent
    assert counts(first.report) == counts(third.report)
    assert counts(second.report) == counts(evaluate_draft(spec, other, False))


def test_a_folder_without_a_draft_is_refused(spec: EvaluatorSpec, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        run(FakeChannel([Evaluate(0, str(tmp_path), False)]), spec)


def test_the_draft_is_lossless(spec: EvaluatorSpec, draft: str) -> None:
    result = check_lossless(spec, draft)
    assert result.lossless
    assert (result.num_prompts, result.num_tokens > 5) == (5, True)
    assert check_lossless(spec, draft, 2).num_prompts == 2
    assert lossless_differences(spec, draft, spec.prompts) == []


def test_a_lossy_rule_is_found_with_its_margin(
    spec: EvaluatorSpec, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lossy(EmbeddedDecoder):
        """With a draft, commits the token after the target's own."""

        def _round(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            accepted, drafts = super()._round(batch)
            if self._draft is not None:
                batch.anchor = (batch.anchor + 1) % VOCAB
            return accepted, drafts

    monkeypatch.setattr(measure, "EmbeddedDecoder", Lossy)
    result = check_lossless(replace(spec, eos_token_ids=()), draft)
    assert not result.lossless
    for item in result.differences:
        assert item.with_draft == (item.without_draft + 1) % VOCAB
        assert 0.0 < item.margin < float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int8"),
        ("max_new_tokens", 0),
        ("batch_size", 0),
        ("num_threads", 0),
        ("temperatures", (-1.0,)),
        ("final_temperatures", (0.0, -0.5)),
    ],
)
def test_settings_out_of_range_are_refused(spec: EvaluatorSpec, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"eval\.{field}="):
        replace(spec, **{field: value})


def test_a_prompt_needs_tokens_and_a_domain_of_its_own() -> None:
    with pytest.raises(ValueError, match="'p' has no tokens"):
        EvalPrompt("p", "code", ())
    with pytest.raises(ValueError, match="domain='all'"):
        EvalPrompt("p", "all", (1,))
