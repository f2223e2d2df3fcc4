"""The two heads on top of the draft's backbone: Markov logits and confidence.

Shapes: B sequence, A anchor, G block position, D hidden, r Markov rank, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from dspark.config import DraftConfig


class MarkovHead(nn.Module):
    """Adds to the base logits what the previous token says: `f @ markov_w2.T`.

    `f` is `W1[x]` (vanilla), `sigmoid(gate([h; W1[x]])) * W1[x]` (gated), or the output of a gated
    cell whose state runs along the block (rnn).

    Source: DSpark (arXiv 2607.05147), section on the sequential head; SGLang 0.5.23,
    srt/models/dspark.py, for the arithmetic that is served.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def step(
        self, hidden_ND: torch.Tensor, prev_N: torch.Tensor, state_Nr: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One block position: features [N, r] and the state for the next one (rnn only).

        Args:
            hidden_ND: the backbone's output at the position, after the final norm.
            prev_N: int64, the token before the one to predict.
            state_Nr: the state left by the position before; None at the block's start.
        """
        embedded_Nr = self.markov_w1(prev_N)
        if self.kind == "vanilla":
            return embedded_Nr, None
        if self.kind == "gated":
            gate_Nr = torch.sigmoid(self.gate_proj(torch.cat([hidden_ND, embedded_Nr], -1)))
            return gate_Nr * embedded_Nr, None
        if state_Nr is None:
            state_Nr = torch.zeros_like(embedded_Nr)
        joint = self.joint_proj(torch.cat([state_Nr, embedded_Nr, hidden_ND], -1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state_Nr = gate * state_Nr + (1.0 - gate) * torch.tanh(candidate)
        return torch.tanh(output), state_Nr

    def forward(self, hidden_BAGD: torch.Tensor, prev_BAG: torch.Tensor) -> torch.Tensor:
        """Features of every block position, [B, A, G, r], with the data's previous tokens."""
        if self.kind != "rnn":
            features, _ = self.step(hidden_BAGD, prev_BAG, None)
            return features
        state = None
        features_G = []
        for position in range(hidden_BAGD.shape[2]):
            features, state = self.step(
                hidden_BAGD[:, :, position], prev_BAG[:, :, position], state
            )
            features_G.append(features)
        return torch.stack(features_G, dim=2)


class ConfidenceHead(nn.Module):
    """Logit of the probability that a draft token is accepted, given those before it were.

    Computed in float32 whatever the backbone's type, as it is served.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.confidence_features, 1)

    def forward(self, hidden: torch.Tensor, embedded_prev: torch.Tensor | None) -> torch.Tensor:
        """float32 logits with the leading shape of `hidden` [..., D]; `embedded_prev` [..., r]."""
        features = hidden.float()
        if self.with_markov:
            assert embedded_prev is not None, "this head reads the previous token's embedding"
            features = torch.cat([features, embedded_prev.float()], dim=-1)
        weight, bias = self.proj.weight.float(), self.proj.bias.float()
        return nn.functional.linear(features, weight, bias).squeeze(-1)
