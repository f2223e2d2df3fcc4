"""The check of a proposal accepts the decoder's own, and sees one other weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoder_testing import make_draft, make_prompts, make_target

from dspark.decoder import EmbeddedDecoder
from dspark.model import DSparkDraft
from dspark.proposal import proposal_margins
from dspark.target_model import TargetModel

BLOCK = 4


def own_proposal(folder: Path, head: str) -> tuple[DSparkDraft, TargetModel, torch.Tensor, list]:
    """A draft, its target, the states of a prompt and what the decoder proposes after it."""
    draft = make_draft(folder, block_size=BLOCK, head=head)
    target = TargetModel(str(folder), draft.config.target_layer_ids, torch.float32, "cpu")
    decoder = EmbeddedDecoder(target, draft)
    prompt = make_prompts([9], 61)[0]
    answer = decoder.decode([prompt], max_new_tokens=1, eos_token_ids=())[0].token_ids
    decoder._cache = target.new_cache()
    batch = decoder._prefill([prompt])
    assert batch.anchor.tolist() == answer
    drafts, _ = decoder._propose(batch, torch.zeros(1, BLOCK))
    positions = torch.arange(9).unsqueeze(0)
    causal = torch.ones(9, 9, dtype=torch.bool).tril().unsqueeze(0)
    _, features = target.forward(torch.tensor([prompt]), positions, causal, target.new_cache())
    return draft, target, features[0], [*answer, *drafts[0].tolist()]


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_the_decoders_own_proposal_has_no_margin(tmp_path: Path, head: str) -> None:
    draft, target, features, tokens = own_proposal(make_target(tmp_path), head)
    margins = proposal_margins(draft, target.embedding, target.lm_head, features, tokens)
    assert len(margins) == BLOCK
    assert max(margins) < 1e-4


def test_other_context_weights_show(tmp_path: Path) -> None:
    draft, target, features, tokens = own_proposal(make_target(tmp_path), "vanilla")
    for layer in draft.layers:
        layer.self_attn.v_proj.weight.data.neg_()
    margins = proposal_margins(draft, target.embedding, target.lm_head, features, tokens)
    assert sum(margins) / BLOCK > 0.01


def test_a_proposal_of_another_length_is_refused(tmp_path: Path) -> None:
    draft, target, features, tokens = own_proposal(make_target(tmp_path), "vanilla")
    with pytest.raises(ValueError, match="4 tokens; allowed: 5"):
        proposal_margins(draft, target.embedding, target.lm_head, features, tokens[:-1])
