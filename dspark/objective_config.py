"""Which terms the objective has, and how the positions of a block are weighted.

Shapes: M block, G block position.

Sources: DSpark (arXiv 2607.05147) eq. 9-12 for the default; LK losses (arXiv 2602.23881) for NLA
and the hybrid; D-PACE (arXiv 2605.18810) for the smoothed credit; `onpolicy_weights` says where
the on-policy form comes from. All assume verification token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WEIGHTINGS = ("decay", "credit", "dpace")
TERMS = ("ce", "l1", "nla", "kl", "lk_hybrid", "accept_onpolicy")


@dataclass(frozen=True)
class ObjectiveConfig:
    """Weights of the terms and of the positions; the default is the public DSpark loss."""

    ce: float = 0.1
    """Cross entropy with the data's token."""
    l1: float = 0.9
    """The raw norm ‖q-p‖₁, twice the total variation."""
    nla: float = 0.0
    """-log α."""
    kl: float = 0.0
    """KL(p‖q)."""
    lk_hybrid: float = 0.0
    """λ KL + (1-λ) TV."""
    accept_onpolicy: float = 0.0
    """-E[τ] where the data was sampled from the target at `temperature`: -Σ W_k α_k, with W_k the
    probability that the data's tokens before k would have been accepted one by one."""
    eta: float = 3.0
    """Of λ = exp(-η α)."""
    confidence: float = 1.0
    """Binary cross entropy of the confidence head with α."""
    detach_confidence_input: bool = False
    """Let the confidence loss move the confidence head alone."""
    position_weights: str = "decay"
    """decay: exp(-k/decay); credit: R_j = Σ_{k>=j} S_k; dpace: the same of smoothed q(y)."""
    decay: float = 4.0
    credit_floor: float = 0.2
    """Share of the decayed weights mixed into credit, so that late positions do not starve."""
    dpace_smoothing: float = 0.5
    """a in (1-a) q(y) + a."""
    temperature: float = 1.0
    """Of both distributions in every term, CE included: the one that the draft is served at."""
    chunk_rows: int = 0
    """Rows whose logits exist at the same time; 0: what suits the device."""
    float8_logits: bool = False
    """Round lm_head and states to float8 in the products that give logits; Hopper or newer."""

    def __post_init__(self) -> None:
        for name in (*TERMS, "confidence", "eta"):
            self._require(name, getattr(self, name) >= 0.0, "0 or more")
        self._require(
            "position_weights", self.position_weights in WEIGHTINGS, ", ".join(WEIGHTINGS)
        )
        self._require("decay", self.decay > 0.0, "above 0")
        self._require("temperature", self.temperature > 0.0, "above 0")
        self._require("chunk_rows", self.chunk_rows >= 0, "0 or more")
        for name in ("credit_floor", "dpace_smoothing"):
            self._require(name, 0.0 <= getattr(self, name) <= 1.0, "0 to 1")
        if not any(getattr(self, name) for name in TERMS):
            raise ValueError(
                f"objective: {', '.join(TERMS[:-1])} and {TERMS[-1]} are all 0; allowed: at least "
                "one above 0; give one of them a weight, or choose objective=dspark"
            )
        # The expected accept length is an average over blocks, as credit is.
        self._require(
            "position_weights",
            not self.accept_onpolicy or self.position_weights != "decay",
            "credit or dpace beside accept_onpolicy",
        )

    @property
    def needs_kl(self) -> bool:
        """Whether any term takes KL(p‖q)."""
        return self.kl > 0.0 or self.lk_hybrid > 0.0

    def _require(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise ValueError(
                f"objective.{name}={getattr(self, name)!r} is not usable; allowed: {allowed}; "
                f"correct objective.{name}"
            )


def decay_weights(
    block_size: int, decay: float, device: torch.device | None = None
) -> torch.Tensor:
    """exp(-k/decay) for k = 0 ... G-1, float32 [G]."""
    return torch.exp(-torch.arange(block_size, device=device, dtype=torch.float32) / decay)


def objective_denominators(
    config: ObjectiveConfig, valid_MG: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the sums of the terms and of the confidence loss are to be divided by, float64 scalars.

    Known before the forward pass, so that one division by the total over the whole optimizer
    window and all ranks is enough. Decayed weights are divided by their own sum; credit by the
    number of blocks, since its sum is the credit itself.

    Args:
        valid_MG: bool [blocks, G].
    """
    weights = decay_weights(valid_MG.shape[1], config.decay, valid_MG.device)
    decayed = (weights * valid_MG).sum().double()
    if config.position_weights == "decay":
        return decayed, decayed
    return valid_MG.any(dim=1).sum().double(), decayed


def position_weights(
    config: ObjectiveConfig,
    alpha_MG: torch.Tensor,
    label_q_MG: torch.Tensor,
    valid_MG: torch.Tensor,
) -> torch.Tensor:
    """Weight of every row, float32 [blocks, G], 0 where not valid; detached from the draft."""
    decayed = decay_weights(valid_MG.shape[1], config.decay, valid_MG.device) * valid_MG
    if config.position_weights == "decay":
        return decayed
    if config.position_weights == "credit":
        factors = alpha_MG
    else:
        a = config.dpace_smoothing
        factors = (1.0 - a) * label_q_MG + a
    survival = torch.where(valid_MG, factors, 0.0).cumprod(dim=1)
    credit = survival.flip(1).cumsum(dim=1).flip(1)
    if config.position_weights == "dpace":
        return credit * valid_MG
    return ((1.0 - config.credit_floor) * credit + config.credit_floor * decayed) * valid_MG


def onpolicy_weights(
    label_ratio_MG: torch.Tensor, alpha_MG: torch.Tensor, valid_MG: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """W_k and the weights of -log q(y) in the gradient of -Σ W_k α_k, each float32 [blocks, G].

    On answers sampled from p, a block's expected number of accepted drafts is the mean of
    Σ_k W_k α_k with W_k = Π_{j<k} min(1, q_j(y_j)/p_j(y_j)): teacher forcing alone would take
    prefixes that the draft would never have got past. W_k depends on the draft too:
    ∇W_k = W_k Σ_{j<k} [q_j < p_j] ∇log q_j(y_j), so row j's -log q(y) gets Σ_{k>j} W_k α_k where
    q_j(y_j) < p_j(y_j).

    Args:
        label_ratio_MG: min(1, q(y)/p(y)) of every row's label.
    """
    ratio = torch.where(valid_MG, label_ratio_MG, 0.0)
    before = torch.cat([torch.ones_like(ratio[:, :1]), ratio[:, :-1]], dim=1)
    prefix = before.cumprod(dim=1) * valid_MG
    gained = prefix * alpha_MG
    later = gained.flip(1).cumsum(dim=1).flip(1) - gained
    return prefix, later * ((ratio < 1.0) & valid_MG)
