"""The embedded speculative decoder: batched, lossless, with the target that is being sped up.

Rows of a batch accept different numbers of tokens. Every round still appends G+1 slots to the
caches of all rows; slots of rejected tokens stay behind as holes that an explicit mask hides, and
are squeezed out once they outnumber the rest. The draft's context K/V share the slots.

Shapes: B active row, G drafted tokens, S cache slot, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dspark.anchors import counter_rng
from dspark.model import ContextKV, DSparkDraft
from dspark.report import Round
from dspark.target_model import TargetModel
from dspark.training import block_embeddings
from dspark.verify import accept_greedy, accept_sampled, draw

COMPACT_RATIO = 1.5
"""Slots per committed token above which the holes are squeezed out."""


@dataclass
class Decoded:
    """One request's response."""

    token_ids: list[int] = field(default_factory=list)
    """Generated tokens, the end-of-turn token included."""
    rounds: list[Round] = field(default_factory=list)


@dataclass
class _Batch:
    """The active rows; every tensor's first axis is the row."""

    requests: list[int]
    anchor: torch.Tensor
    """int64 [B], the last committed token."""
    position: torch.Tensor
    """int64 [B], its position; everything before it is in the cache."""
    slots: torch.Tensor
    """bool [B, S], slots that hold committed tokens."""
    draft_context: ContextKV


class EmbeddedDecoder:
    """Decodes with a draft, or without one (`draft=None`) through the very same target calls.

    Args:
        target: captures the layers that the draft was trained on.
    """

    def __init__(self, target: TargetModel, draft: DSparkDraft | None) -> None:
        if draft is not None and draft.config.target_layer_ids != target.layer_ids:
            raise ValueError(
                f"draft: it reads the target's layers {list(draft.config.target_layer_ids)}, but "
                f"{list(target.layer_ids)} are captured; load the target with the draft's layers"
            )
        self._target, self._draft = target, draft
        self._block_size = 0 if draft is None else draft.config.block_size
        self.draft_seconds = 0.0
        self.verify_seconds = 0.0

    @torch.no_grad()
    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float = 0.0,
        seed: int = 0,
        request_ids: Sequence[str] | None = None,
    ) -> list[Decoded]:
        """Decode a batch of prompts to their ends.

        Args:
            temperature: 0 is greedy; above, draft and target are sampled at it and drafts are
                accepted by rejection sampling.
            request_ids: key the random numbers together with `seed`; positions by default. A
                request's result does not depend on what it is batched with, up to rounding.

        Raises:
            ValueError: an empty prompt, or a setting out of range.
        """
        names = [str(i) for i in range(len(prompts))] if request_ids is None else request_ids
        _check_request(prompts, names, max_new_tokens, temperature)
        if not prompts:
            return []
        self._rngs = [counter_rng("decode", seed, name) for name in names]
        self._temperature = temperature
        self._cache = self._target.new_cache()
        results = [Decoded() for _ in prompts]
        ends = set(eos_token_ids)
        batch = self._prefill(prompts)
        for row, token in enumerate(batch.anchor.tolist()):
            results[row].token_ids.append(token)
        self._drop_finished(batch, results, max_new_tokens, ends)
        while batch.requests:
            accepted, drafts = self._round(batch)
            self._commit(batch, results, accepted, drafts, max_new_tokens, ends)
            self._drop_finished(batch, results, max_new_tokens, ends)
            self._compact(batch)
        return results

    # --- one round -------------------------------------------------------------------------------

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> _Batch:
        device = self._target.device
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        width = int(lengths.max())
        ids = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        places = torch.arange(width, device=device)
        slots = places.unsqueeze(0) < lengths.unsqueeze(1)
        causal = places.unsqueeze(1) >= places.unsqueeze(0)
        # Rows of padding look at themselves: a row that sees nothing would be NaN.
        mask = causal & (slots.unsqueeze(1) | torch.eye(width, dtype=torch.bool, device=device))
        positions = places.expand(len(prompts), width)
        states, features = self._target.forward(ids, positions, mask, self._cache)
        context = [] if self._draft is None else self._draft.context_kv(features, positions)
        last = states[torch.arange(len(prompts), device=device), lengths - 1]
        rows = list(range(len(prompts)))
        first = self._choose(last @ self._target.lm_head.t(), self._uniforms(rows, 1)[:, 0])
        return _Batch(rows, first, lengths, slots, context)

    def _round(self, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft, verify, and take the accepted tokens into the caches.

        Returns:
            accepted drafts [B] and the drafts [B, G]; `batch.anchor` is the new anchor.
        """
        started = time.perf_counter()
        block = self._block_size
        uniforms = self._uniforms(batch.requests, 2 * block + 1)
        drafts, probs = self._propose(batch, uniforms[:, :block])
        drafted = time.perf_counter()
        window = torch.cat([batch.anchor.unsqueeze(1), drafts], dim=1)
        offsets = torch.arange(block + 1, device=window.device)
        positions = batch.position.unsqueeze(1) + offsets
        own = offsets.unsqueeze(1) >= offsets.unsqueeze(0)
        size = len(batch.requests)
        mask = torch.cat(
            [
                batch.slots.unsqueeze(1).expand(size, block + 1, -1),
                own.expand(size, block + 1, block + 1),
            ],
            dim=2,
        )
        states, features = self._target.forward(window, positions, mask, self._cache)
        logits = states @ self._target.lm_head.t()
        if self._temperature == 0.0:
            accepted, following = accept_greedy(_argmax(logits), drafts)
        else:
            target_probs = self._probs(logits)
            accepted, following = (
                accept_sampled(
                    target_probs, probs, drafts, uniforms[:, block : 2 * block], uniforms[:, -1]
                )
                if probs is not None
                else (batch.position.new_zeros(size), draw(target_probs[:, 0], uniforms[:, -1]))
            )
        if self._draft is not None:
            added = self._draft.context_kv(features, positions)
            batch.draft_context = [
                (torch.cat([k, more_k], dim=2), torch.cat([v, more_v], dim=2))
                for (k, v), (more_k, more_v) in zip(batch.draft_context, added, strict=True)
            ]
        kept = offsets.unsqueeze(0) <= accepted.unsqueeze(1)
        batch.slots = torch.cat([batch.slots, kept], dim=1)
        batch.position = batch.position + accepted + 1
        batch.anchor = following
        self.draft_seconds += drafted - started
        self.verify_seconds += time.perf_counter() - drafted
        return accepted, drafts

    def _propose(
        self, batch: _Batch, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts [B, G], and in sampling the distributions [B, G, V] they were drawn from."""
        draft, block = self._draft, self._block_size
        if draft is None:
            return batch.anchor.new_zeros(len(batch.requests), 0), None
        embeds = block_embeddings(
            self._target.embedding, batch.anchor, draft.config.mask_token_id, block
        )
        hidden_BGD = draft.forward_blocks(
            embeds.unsqueeze(1),
            batch.position.unsqueeze(1),
            batch.draft_context,
            batch.slots.unsqueeze(1),
        ).squeeze(1)
        base = hidden_BGD @ self._target.lm_head.t()
        previous, state = batch.anchor, None
        tokens, distributions = [], []
        for g in range(block):
            features, state = draft.markov_step(hidden_BGD[:, g], previous, state)
            logits = base[:, g]
            if features is not None and draft.markov_head is not None:
                logits = torch.addmm(logits, features, draft.markov_head.markov_w2.weight.t())
            if self._temperature == 0.0:
                previous = _argmax(logits)
            else:
                probs = self._probs(logits)
                distributions.append(probs)
                previous = draw(probs, uniforms[:, g])
            tokens.append(previous)
        return torch.stack(tokens, dim=1), torch.stack(distributions, 1) if distributions else None

    def _probs(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.softmax(logits.float() / self._temperature, dim=-1)

    def _choose(self, logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        if self._temperature == 0.0:
            return _argmax(logits)
        return draw(self._probs(logits), uniforms)

    def _uniforms(self, requests: Sequence[int], count: int) -> torch.Tensor:
        """float64 [B, count] from each request's own stream; zeros in greedy decoding."""
        if self._temperature == 0.0:
            return torch.zeros(len(requests), count, device=self._target.device)
        drawn = np.stack([self._rngs[r].random(count) for r in requests])
        return torch.from_numpy(drawn).to(self._target.device)

    # --- bookkeeping -----------------------------------------------------------------------------

    @staticmethod
    def _commit(
        batch: _Batch,
        results: list[Decoded],
        accepted: torch.Tensor,
        drafts: torch.Tensor,
        max_new_tokens: int,
        ends: set[int],
    ) -> None:
        """Append what a round committed, cut at the end of each response, and count the round."""
        # One copy of each from the device, not one a row.
        columns = (accepted.tolist(), drafts.tolist(), batch.anchor.tolist())
        for request, count, drafted, following in zip(batch.requests, *columns, strict=True):
            result = results[request]
            tokens = [*drafted[:count], following]
            room = max_new_tokens - len(result.token_ids)
            end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
            tokens = tokens[: min(room, end)]
            result.token_ids += tokens
            result.rounds.append(Round(min(count, len(tokens)), len(tokens)))

    def _drop_finished(
        self, batch: _Batch, results: list[Decoded], max_new_tokens: int, ends: set[int]
    ) -> None:
        """Take finished rows out of the batch and its caches."""
        alive = [
            row
            for row, request in enumerate(batch.requests)
            if len(results[request].token_ids) < max_new_tokens
            and results[request].token_ids[-1] not in ends
        ]
        if len(alive) == len(batch.requests):
            return
        batch.requests = [batch.requests[row] for row in alive]
        index = torch.tensor(alive, dtype=torch.int64, device=batch.anchor.device)
        batch.anchor, batch.position = batch.anchor[index], batch.position[index]
        batch.slots = batch.slots[index]
        batch.draft_context = [(k[index], v[index]) for k, v in batch.draft_context]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]

    def _compact(self, batch: _Batch) -> None:
        """Squeeze the holes out of every cache once they make it much longer than it need be."""
        if not batch.requests:
            return
        length = int(batch.slots.sum(1).max())
        if batch.slots.shape[1] <= COMPACT_RATIO * length:
            return
        # A stable sort moves the committed slots to the front, in their order.
        order = torch.sort(batch.slots, dim=1, descending=True, stable=True).indices[:, :length]
        index = order.view(order.shape[0], 1, length, 1)

        def squeeze(x: torch.Tensor) -> torch.Tensor:
            return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))

        batch.slots = batch.slots.gather(1, order)
        batch.draft_context = [(squeeze(k), squeeze(v)) for k, v in batch.draft_context]
        for layer in self._cache.layers:
            layer.keys, layer.values = squeeze(layer.keys), squeeze(layer.values)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    # In bfloat16 on a CPU four times as fast as argmax, and as argmax it takes the first of equals.
    return logits.max(dim=-1).indices


def _check_request(
    prompts: Sequence[Sequence[int]],
    request_ids: Sequence[str],
    max_new_tokens: int,
    temperature: float,
) -> None:
    if any(not prompt for prompt in prompts):
        raise ValueError("decode: a prompt has no tokens; give at least one token")
    if len(request_ids) != len(prompts):
        raise ValueError(
            f"decode: request_ids holds {len(request_ids)} names; allowed: one for each of the "
            f"{len(prompts)} prompts; name every request"
        )
    if max_new_tokens < 1:
        raise ValueError(
            f"decode: max_new_tokens={max_new_tokens} is not usable; allowed: 1 or more; raise it"
        )
    if not temperature >= 0.0:
        raise ValueError(
            f"decode: temperature={temperature} is not usable; allowed: 0 or more; 0 is greedy"
        )
