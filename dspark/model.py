"""The draft: a few decoder layers that read the target's hidden states and draft a whole block.

Shapes: B sequence, S context position, A anchor, G block position (row g predicts the token g+1
after the anchor), D hidden, F = K*D context features, T new positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from dspark.attention import Visible, attend, attention_mask
from dspark.config import DraftConfig
from dspark.heads import ConfidenceHead, MarkovHead
from dspark.rope import RotaryTable, apply_rotary

ContextKV = list[tuple[torch.Tensor, torch.Tensor]]
"""Per draft layer K and V, each [B, n_kv, S, head_dim]."""


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


class DraftAttention(nn.Module):
    """Grouped-query attention of block rows over the context and their own block."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        heads, kv_heads, width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, heads * width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(width, config.rms_norm_eps)
        self.k_norm = RMSNorm(width, config.rms_norm_eps)

    def keys_values(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated K and V of positions, each [B, n_kv, T, head_dim]."""
        batch, length, _ = x_BTD.shape
        keys = self.k_norm(self.k_proj(x_BTD).view(batch, length, self.kv_heads, self.head_dim))
        values = self.v_proj(x_BTD).view(batch, length, self.kv_heads, self.head_dim)
        return apply_rotary(keys.transpose(1, 2), cos, sin), values.transpose(1, 2)

    def forward(
        self,
        x_BTD: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        mask: Visible,
    ) -> torch.Tensor:
        """Attend from T block rows; `mask` as for `attend`."""
        batch, length, _ = x_BTD.shape
        queries = self.q_norm(self.q_proj(x_BTD).view(batch, length, self.heads, self.head_dim))
        queries = apply_rotary(queries.transpose(1, 2), cos, sin)
        out = attend(queries, context, self.keys_values(x_BTD, cos, sin), mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class DraftMLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One pre-norm decoder layer for block rows."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        mask: Visible,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DSparkDraft(nn.Module):
    """The trainable draft; embedding and lm_head are the target's and are not part of it.

    Parameter names are those that SGLang loads.

    Source: arXiv 2607.05147; arithmetic as in SGLang 0.5.23, srt/models/{dspark,dflash}.py.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_context_features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config)
        # Not a submodule: it has no weights, and a cast to bfloat16 must not reach its angles.
        self._rotary = RotaryTable(config)
        self.reset_parameters()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._rotary.to(self.fc.weight.device)
        return self

    def reset_parameters(self) -> None:
        """Random weights; the Markov head and the confidence head start as silent."""
        depth_scale = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
            elif name.endswith(("markov_w2.weight", "confidence_head.proj.weight")):
                nn.init.zeros_(parameter)
            else:
                silent = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 * (depth_scale if silent else 1.0))

    def context_features(self, states_BSF: torch.Tensor) -> torch.Tensor:
        """One vector [B, S, D] per position from the target's captured hidden states."""
        return self.hidden_norm(self.fc(states_BSF))

    def context_kv(self, states_BSF: torch.Tensor, positions_BS: torch.Tensor) -> ContextKV:
        """Every draft layer's K and V of context positions.

        Args:
            states_BSF: the captured layers' outputs, concatenated in ascending layer order.
            positions_BS: int64, absolute positions.
        """
        features = self.context_features(states_BSF)
        cos, sin = self._rotary(positions_BS)
        return [layer.self_attn.keys_values(features, cos, sin) for layer in self.layers]

    def forward_blocks(
        self,
        block_embeds_BAGD: torch.Tensor,
        anchor_positions_BA: torch.Tensor,
        context: ContextKV,
        visible: Visible,
    ) -> torch.Tensor:
        """Hidden states of every block row, after the final norm, [B, A, G, D].

        Args:
            block_embeds_BAGD: target embeddings of [anchor, MASK, ..., MASK].
            anchor_positions_BA: int64, absolute positions of the anchors.
            context: from `context_kv`.
            visible: bool [B, A, S], which context slots an anchor's rows may look at; or their
                bounds, for the Triton kernels.
        """
        batch, anchors, block, width = block_embeds_BAGD.shape
        mask = attention_mask(visible, block) if isinstance(visible, torch.Tensor) else visible
        offsets = torch.arange(block, device=anchor_positions_BA.device)
        positions = (anchor_positions_BA.unsqueeze(-1) + offsets).view(batch, anchors * block)
        x = block_embeds_BAGD.reshape(batch, anchors * block, width)
        cos, sin = self._rotary(positions)
        for layer, layer_context in zip(self.layers, context, strict=True):
            x = layer(x, cos, sin, layer_context, mask)
        return self.norm(x).view(batch, anchors, block, width)

    def markov_features(
        self, hidden_BAGD: torch.Tensor, prev_BAG: torch.Tensor
    ) -> torch.Tensor | None:
        """Features f [B, A, G, r] such that the logits are `h @ lm_head.T + f @ markov_w2.T`.

        Args:
            prev_BAG: int64, the token before the one that a row predicts.

        Returns:
            None for a draft without a Markov head.
        """
        return None if self.markov_head is None else self.markov_head(hidden_BAGD, prev_BAG)

    def markov_step(
        self, hidden_BD: torch.Tensor, prev_B: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Decoding: features [B, r] of one block position and the state for the next."""
        if self.markov_head is None:
            return None, None
        return self.markov_head.step(hidden_BD, prev_B, state)

    def confidence_logits(
        self, hidden: torch.Tensor, prev: torch.Tensor, *, detach_input: bool = False
    ) -> torch.Tensor:
        """float32 logits of acceptance, shaped like `prev`; `hidden` is [..., D].

        Args:
            detach_input: let gradients reach the head's own weights alone.
        """
        embedded = None
        if self.confidence_head.with_markov:
            assert self.markov_head is not None, "a confidence head with Markov features needs one"
            embedded = self.markov_head.markov_w1(prev)
        if detach_input:
            hidden = hidden.detach()
            embedded = None if embedded is None else embedded.detach()
        return self.confidence_head(hidden, embedded)
