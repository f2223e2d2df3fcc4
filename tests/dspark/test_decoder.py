"""The embedded decoder against plain loops, in greedy decoding and in sampling."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from decoder_testing import (
    EOS,
    chi_square_p_value,
    make_draft,
    make_prompts,
    make_target,
    plain_greedy,
    plain_speculative,
)
from torch import Tensor

import dspark.decoder
from dspark.decoder import EmbeddedDecoder, _Batch
from dspark.model import DSparkDraft
from dspark.report import Round
from dspark.target_model import TargetModel
from dspark.verify import accept_sampled, draw

LENGTHS = [1, 2, 3, 5, 8, 8, 13, 21, 34]
HEADS = [(0, "vanilla"), (8, "vanilla"), (8, "gated"), (8, "rnn")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven tokens: a random draft is accepted every now and then."""
    return make_target(tmp_path_factory.mktemp("small"), vocab_size=7, seed=5, std=0.3)


def load(folder: Path, draft: DSparkDraft) -> TargetModel:
    return TargetModel(folder, draft.config.target_layer_ids, torch.float32)


class Spy(EmbeddedDecoder):
    """Notes every request's drafts."""

    def __init__(self, target: TargetModel, draft: DSparkDraft) -> None:
        super().__init__(target, draft)
        self.drafts: dict[int, list[list[int]]] = {}

    def _propose(self, batch: _Batch, uniforms: Tensor) -> tuple[Tensor, Tensor | None]:
        drafts, probs = super()._propose(batch, uniforms)
        for request, row in zip(batch.requests, drafts.tolist(), strict=True):
            self.drafts.setdefault(request, []).append(row)
        return drafts, probs


class Oracle(EmbeddedDecoder):
    """Drafts the target's own continuation, with every token wrong by chance."""

    def __init__(
        self, target: TargetModel, draft: DSparkDraft, outputs: list[list[int]], wrong: float = 0.0
    ) -> None:
        super().__init__(target, draft)
        self.outputs, self.wrong = outputs, wrong
        self.prompt_lengths: list[int] = []
        self.widths: list[int] = []
        self.sizes: list[int] = []
        self._noise = torch.Generator().manual_seed(0)

    def _prefill(self, prompts: list[list[int]]) -> _Batch:
        self.prompt_lengths = [len(p) for p in prompts]
        return super()._prefill(prompts)

    def _propose(self, batch: _Batch, uniforms: Tensor) -> tuple[Tensor, Tensor | None]:
        # The draft runs all the same: its context must follow every drop and compaction.
        drafts, _ = super()._propose(batch, uniforms)
        self.widths.append(batch.slots.shape[1])
        self.sizes.append(len(batch.requests))
        for row, (request, position) in enumerate(
            zip(batch.requests, batch.position.tolist(), strict=True)
        ):
            done = position - self.prompt_lengths[request] + 1
            right = self.outputs[request][done : done + self._block_size]
            drafts[row, : len(right)] = torch.tensor(right, dtype=torch.int64)
        flips = torch.rand(drafts.shape, generator=self._noise) < self.wrong
        return torch.where(flips, (drafts + 1) % self._target.lm_head.shape[0], drafts), None


# --- greedy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 3, 7])
@pytest.mark.parametrize(("rank", "head"), HEADS)
def test_tokens_drafts_and_counts_equal_the_plain_loops(
    small: Path, block_size: int, rank: int, head: str
) -> None:
    draft = make_draft(small, block_size=block_size, rank=rank, head=head)
    target = load(small, draft)
    prompts = make_prompts([1, 2, 4, 9, 17], 7)
    decoder = Spy(target, draft)
    decoded = decoder.decode(prompts, max_new_tokens=17, eos_token_ids=[EOS])
    for request, (prompt, ours) in enumerate(zip(prompts, decoded, strict=True)):
        loop = plain_speculative(target.model, draft, prompt, 17, {EOS})
        assert ours.token_ids == loop.tokens
        assert ours.token_ids == plain_greedy(target.model, prompt, 17, {EOS})
        assert decoder.drafts.get(request, []) == loop.drafts
        counts = [r.num_accepted_drafts for r in ours.rounds]
        assert counts[:-1] == loop.accepted[:-1]
        assert sum(r.num_tokens for r in ours.rounds) == len(ours.token_ids) - 1
        if counts:
            assert counts[-1] == min(loop.accepted[-1], ours.rounds[-1].num_tokens)


def test_the_small_target_accepts_drafts_of_the_random_draft(small: Path) -> None:
    draft = make_draft(small, block_size=3)
    decoded = EmbeddedDecoder(load(small, draft), draft).decode(
        make_prompts([3] * 20, 7), max_new_tokens=17, eos_token_ids=[]
    )
    counts = [r.num_accepted_drafts for d in decoded for r in d.rounds]
    share = sum(count > 0 for count in counts) / len(counts)
    assert 0.05 < share < 0.95, "the comparison with the loop would compare no acceptance"


@pytest.mark.parametrize("wrong", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("block_size", [1, 3, 7])
def test_greedy_output_is_unchanged_by_any_acceptance(
    folder: Path, block_size: int, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dspark.decoder, "COMPACT_RATIO", 1.0)
    draft = make_draft(folder, block_size=block_size)
    target = load(folder, draft)
    prompts = make_prompts(LENGTHS, 61)
    outputs = [plain_greedy(target.model, p, 40 + block_size, {EOS}) for p in prompts]
    decoder = Oracle(target, draft, outputs, wrong)
    decoded = decoder.decode(prompts, max_new_tokens=40, eos_token_ids=[EOS])
    assert [d.token_ids for d in decoded] == [o[:40] for o in outputs]
    assert min(decoder.sizes) < max(decoder.sizes), "no row was dropped before the others"
    if wrong > 0.5:
        shrunk = [b < a for a, b in itertools.pairwise(decoder.widths)]
        assert any(shrunk), "nothing was compacted"


def test_drafts_after_drops_and_compaction_are_those_of_the_row_alone(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = make_draft(small, block_size=3)
    target = load(small, draft)
    prompts = make_prompts([2, 19, 7, 11], 7)
    monkeypatch.setattr(dspark.decoder, "COMPACT_RATIO", 1.0)
    together = Spy(target, draft)
    together.decode(prompts, max_new_tokens=30, eos_token_ids=[EOS])
    monkeypatch.setattr(dspark.decoder, "COMPACT_RATIO", 1e9)
    for request, prompt in enumerate(prompts):
        alone = Spy(target, draft)
        alone.decode([prompt], max_new_tokens=30, eos_token_ids=[EOS])
        assert alone.drafts.get(0) == together.drafts.get(request)


def test_a_perfect_draft_fills_every_round(folder: Path) -> None:
    draft = make_draft(folder, block_size=4)
    target = load(folder, draft)
    prompts = make_prompts([3, 9, 6], 61)
    outputs = [plain_greedy(target.model, p, 30, set()) for p in prompts]
    decoded = Oracle(target, draft, outputs).decode(prompts, max_new_tokens=21, eos_token_ids=[])
    for ours, wanted in zip(decoded, outputs, strict=True):
        assert ours.token_ids == wanted[:21]
        assert ours.rounds == [Round(4, 5)] * 4


@pytest.mark.parametrize("place", range(8))
def test_the_end_cuts_a_round_where_it_stands(folder: Path, place: int) -> None:
    draft = make_draft(folder, block_size=4)
    target = load(folder, draft)
    prompt = make_prompts([5], 61)[0]
    output = plain_greedy(target.model, prompt, 20, set())
    end = output[place]
    first = output.index(end)
    (ours,) = Oracle(target, draft, [output]).decode(
        [prompt], max_new_tokens=20, eos_token_ids=[end]
    )
    assert ours.token_ids == output[: first + 1]
    full, rest = divmod(first, 5)
    assert ours.rounds == [Round(4, 5)] * full + [Round(rest, rest)] * bool(rest)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, 6, 7])
def test_max_new_tokens_cuts_a_round(folder: Path, max_new_tokens: int) -> None:
    draft = make_draft(folder, block_size=4)
    target = load(folder, draft)
    prompt = make_prompts([5], 61)[0]
    output = plain_greedy(target.model, prompt, 20, set())
    (ours,) = Oracle(target, draft, [output]).decode(
        [prompt], max_new_tokens=max_new_tokens, eos_token_ids=[]
    )
    assert ours.token_ids == output[:max_new_tokens]
    assert sum(r.num_tokens for r in ours.rounds) == max_new_tokens - 1


def test_without_a_draft_the_wrapper_decodes_plainly(folder: Path) -> None:
    target = TargetModel(folder, (), torch.float32)
    prompts = make_prompts(LENGTHS, 61)
    decoded = EmbeddedDecoder(target, None).decode(prompts, max_new_tokens=25, eos_token_ids=[EOS])
    for prompt, ours in zip(prompts, decoded, strict=True):
        assert ours.token_ids == plain_greedy(target.model, prompt, 25, {EOS})
        assert ours.rounds == [Round(0, 1)] * (len(ours.token_ids) - 1)


# --- sampling ------------------------------------------------------------------------------------

TEMPERATURE, SAMPLES, TOKENS = 1.3, 6000, 3


def joint_distribution(target: TargetModel, prompt: list[int], vocab: int) -> Tensor:
    """Exact probabilities [V**TOKENS] of the response's tokens, by a pass over every prefix."""
    codes = list(itertools.product(range(vocab), repeat=TOKENS))
    logits = target.model(torch.tensor([prompt + list(c) for c in codes])).logits
    logs = torch.log_softmax(logits[:, len(prompt) - 1 : -1].double() / TEMPERATURE, -1)
    return logs.gather(2, torch.tensor(codes).unsqueeze(-1)).sum((1, 2)).exp()


def sampled_counts(target: TargetModel, draft: DSparkDraft | None, prompt: list[int]) -> Tensor:
    vocab = target.lm_head.shape[0]
    counts = torch.zeros(vocab**TOKENS)
    decoder = EmbeddedDecoder(target, draft)
    for seed in range(SAMPLES // 1000):
        decoded = decoder.decode(
            [prompt] * 1000,
            max_new_tokens=TOKENS,
            eos_token_ids=[],
            temperature=TEMPERATURE,
            seed=seed,
        )
        codes = torch.tensor([d.token_ids for d in decoded])
        index = (codes * vocab ** torch.arange(TOKENS - 1, -1, -1)).sum(1)
        counts += torch.bincount(index, minlength=vocab**TOKENS)
    return counts


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_samples_are_distributed_as_the_targets(tmp_path: Path, block_size: int) -> None:
    folder = make_target(tmp_path, vocab_size=6, seed=9, std=0.2)
    draft = make_draft(folder, block_size=block_size, head="rnn")
    target = load(folder, draft)
    wanted = joint_distribution(target, [4, 5, 1], 6)
    assert chi_square_p_value(sampled_counts(target, draft, [4, 5, 1]), wanted) > 1e-3
    if block_size == 1:
        assert chi_square_p_value(sampled_counts(target, None, [4, 5, 1]), wanted) > 1e-3


def test_a_wrong_rule_shows_in_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_residual(
        p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, final: Tensor
    ) -> tuple[Tensor, Tensor]:
        accepted, _ = accept_sampled(p, q, drafts, accept, final)
        return accepted, draw(p[torch.arange(len(p)), accepted], final)

    monkeypatch.setattr(dspark.decoder, "accept_sampled", no_residual)
    folder = make_target(tmp_path, vocab_size=6, seed=9, std=0.2)
    draft = make_draft(folder, block_size=2, head="rnn")
    target = load(folder, draft)
    wanted = joint_distribution(target, [4, 5, 1], 6)
    assert chi_square_p_value(sampled_counts(target, draft, [4, 5, 1]), wanted) < 1e-6


def test_a_request_draws_the_same_whatever_it_is_batched_with(folder: Path) -> None:
    draft = make_draft(folder, block_size=3)
    decoder = EmbeddedDecoder(load(folder, draft), draft)
    prompts = make_prompts([4, 12, 7], 61)
    settings = {"max_new_tokens": 20, "eos_token_ids": [EOS], "temperature": 1.0}
    together = decoder.decode(prompts, request_ids=["a", "b", "c"], seed=5, **settings)
    for name, prompt, wanted in zip("abc", prompts, together, strict=True):
        (alone,) = decoder.decode([prompt], request_ids=[name], seed=5, **settings)
        assert alone == wanted
    (other,) = decoder.decode(prompts[:1], request_ids=["a"], seed=6, **settings)
    assert other.token_ids != together[0].token_ids


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": [[1], []]}, "no tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"request_ids": ["only one"]}, "request_ids"),
    ],
)
def test_bad_requests_are_refused(folder: Path, change: dict[str, object], message: str) -> None:
    request = {"prompts": [[1], [2]], "max_new_tokens": 4, "eos_token_ids": []} | change
    with pytest.raises(ValueError, match=message):
        EmbeddedDecoder(TargetModel(folder, (), torch.float32), None).decode(**request)


def test_no_prompts_give_no_results(folder: Path) -> None:
    decoder = EmbeddedDecoder(TargetModel(folder, (), torch.float32), None)
    assert decoder.decode([], max_new_tokens=4, eos_token_ids=[]) == []


def test_a_draft_of_other_layers_is_refused(folder: Path) -> None:
    draft = make_draft(folder, block_size=2)
    with pytest.raises(ValueError, match=r"\[0, 2\], but \[1, 2\] are captured"):
        EmbeddedDecoder(TargetModel(folder, (1, 2), torch.float32), draft)
