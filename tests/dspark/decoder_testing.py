"""Tiny targets and drafts, and loops written without the decoder's machinery."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.config import DraftConfig
from dspark.model import DSparkDraft

EOS = 3


def make_target(folder: Path, *, vocab_size: int = 61, seed: int = 0, std: float = 0.15) -> Path:
    """A random Llama of four layers, with weights large enough for varied output."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=std,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_draft(
    folder: Path, *, block_size: int, rank: int = 8, head: str = "vanilla", seed: int = 1
) -> DSparkDraft:
    """A random draft for the target in `folder`; every weight differs from zero."""
    target = LlamaConfig.from_pretrained(folder).to_dict()
    config = DraftConfig.for_target(
        target,
        num_layers=2,
        block_size=block_size,
        mask_token_id=2,
        markov_rank=rank,
        markov_head_type=head,
        confidence_head_with_markov=rank > 0,
        target_layer_ids=(0, 2),
    )
    draft = DSparkDraft(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise * 0.3 if parameter.dim() > 1 else 1.0 + noise * 0.2
    return draft.eval().requires_grad_(False)


def make_prompts(lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths, without the end-of-turn token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(EOS + 1, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def cut(tokens: list[int], room: int, eos: set[int]) -> list[int]:
    """Up to `room` tokens, and no further than the first end-of-turn token."""
    kept = []
    for token in tokens[:room]:
        kept.append(token)
        if token in eos:
            break
    return kept


def plain_greedy(
    model: LlamaForCausalLM, prompt: list[int], max_new_tokens: int, eos: set[int]
) -> list[int]:
    """Greedy decoding without a cache."""
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in eos):
        logits = model(torch.tensor([prompt + tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


@dataclass
class LoopResult:
    """What the plain speculative loop did."""

    tokens: list[int]
    drafts: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    """Per round, before the cut at the end of the response."""


def plain_speculative(
    model: LlamaForCausalLM,
    draft: DSparkDraft,
    prompt: list[int],
    max_new_tokens: int,
    eos: set[int],
) -> LoopResult:
    """Greedy decoding with a draft: one prompt, no cache, everything anew in every round."""
    result = LoopResult(plain_greedy(model, prompt, 1, eos))
    while len(result.tokens) < max_new_tokens and result.tokens[-1] not in eos:
        sequence = prompt + result.tokens
        drafts = _propose(model, draft, sequence)
        choices = model(torch.tensor([sequence + drafts])).logits[0].argmax(-1).tolist()
        choices = choices[len(sequence) - 1 :]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
            accepted += 1
        committed = [*drafts[:accepted], choices[accepted]]
        result.tokens += cut(committed, max_new_tokens - len(result.tokens), eos)
        result.drafts.append(drafts)
        result.accepted.append(accepted)
    return result


def _propose(model: LlamaForCausalLM, draft: DSparkDraft, sequence: list[int]) -> list[int]:
    config = draft.config
    anchor = len(sequence) - 1
    hidden = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
    features = torch.cat([hidden[i + 1] for i in config.target_layer_ids], dim=-1)[:, :anchor]
    context = draft.context_kv(features, torch.arange(anchor).unsqueeze(0))
    block_ids = [sequence[anchor]] + [config.mask_token_id] * (config.block_size - 1)
    embeds = model.model.embed_tokens(torch.tensor([[block_ids]]))
    seen = torch.ones(1, 1, anchor, dtype=torch.bool)
    rows = draft.forward_blocks(embeds, torch.tensor([[anchor]]), context, seen)[0, 0]
    tokens, state = [], None
    previous = sequence[anchor]
    for row in rows:
        logits = model.lm_head(row)
        bias, state = draft.markov_step(row.unsqueeze(0), torch.tensor([previous]), state)
        if bias is not None:
            logits = logits + bias[0] @ draft.markov_head.markov_w2.weight.T
        previous = int(logits.argmax())
        tokens.append(previous)
    return tokens


def chi_square_p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's test of counts [N] against probabilities [N]; cells under 5 are put together."""
    expected = probabilities.double() * counts.sum()
    small = expected < 5.0
    seen = torch.cat([counts[~small].double(), counts[small].sum().double().reshape(1)])
    wanted = torch.cat([expected[~small], expected[small].sum().reshape(1)])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((wanted.numel() - 1) / 2.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2.0))
