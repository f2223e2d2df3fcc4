"""The settings of the processes of a run: how the target is run, and which processors do what."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitserve.setting_checks import check, check_at_least, check_one_of


@dataclass(frozen=True)
class EngineSettings:
    """The process that runs the frozen target."""

    kind: str = "sglang"
    """sglang, or transformers for tests and tiny targets."""
    chunked_prefill_size: int = 512
    """Tokens of one forward pass of a prefill."""
    max_running_requests: int = 64
    """Requests in one decode step."""
    max_in_flight: int = 96
    """Requests handed to the engine at once."""
    prefill_together: int = 1
    """Prompts that SGLang prefills at once while it decodes; fewer wait for a few decode steps. For
    a small target a prefill of one takes nearly as long as one of many. A quarter of
    max_running_requests, or a full pass, is always enough."""
    port: int = 0
    """SGLang's port; 0 picks a free one."""
    num_threads: int = 1
    """CPU threads per engine rank."""
    speculate: str = "auto"
    """Whether the engine runs the draft that is being trained: on (measures the accept length as it
    is served, and answers faster), off (captures only), auto (on where SGLang can: a GPU, and a
    draft with a Markov head)."""
    attention_backend: str = ""
    """SGLang's on a GPU; empty leaves it to SGLang."""
    memory_fraction: float = 0.0
    """Of each target GPU, for weights and KV cache; 0 leaves it to `splitserve plan`'s rule."""
    kv_cache_tokens: int = 0
    """Tokens of KV cache; 0 is enough for every running request at its longest."""
    cuda_graph_batch_sizes: list[int] = field(default_factory=list)
    """Requests per decode step for which a CUDA graph is captured; empty spreads a few."""
    mixed_chunk: bool = False
    """Let prefill chunks and decode steps share forward passes."""
    selfcheck_tolerance: float = 0.0
    """Largest mean difference of log-probabilities in the self-check, nats; 0 goes by dtype."""
    max_restarts: int = 2
    """Times that an engine or an evaluator that died is started again."""
    start_timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_one_of("engine.kind", self.kind, ("sglang", "transformers"))
        check_one_of("engine.speculate", self.speculate, ("auto", "on", "off"))
        for name in ("chunked_prefill_size", "max_running_requests", "max_in_flight"):
            check_at_least(f"engine.{name}", getattr(self, name), 1)
        for name in ("prefill_together", "num_threads"):
            check_at_least(f"engine.{name}", getattr(self, name), 1)
        check(
            "engine.memory_fraction",
            self.memory_fraction,
            0.0 <= self.memory_fraction < 1.0,
            "0 to below 1",
        )
        check_at_least("engine.kv_cache_tokens", self.kv_cache_tokens, 0)
        for size in self.cuda_graph_batch_sizes:
            check_at_least("engine.cuda_graph_batch_sizes", size, 1)
        check_at_least("engine.selfcheck_tolerance", self.selfcheck_tolerance, 0.0)
        check_at_least("engine.max_restarts", self.max_restarts, 0)
        check_at_least("engine.start_timeout_seconds", self.start_timeout_seconds, 1.0)
        check("engine.port", self.port, 0 <= self.port < 65536, "0 to 65535")


@dataclass(frozen=True)
class LayoutSettings:
    """Which processors do what."""

    device: str = "cpu"
    """cpu or cuda."""
    target: list[int] = field(default_factory=list)
    """GPUs of the target half, counted among the visible ones; an engine splits the target over
    its share of them (tensor parallel)."""
    engines: int = 1
    """Engines of the target half, each with its share of the GPUs and a whole target."""
    train: list[int] = field(default_factory=list)
    """GPUs of the draft half, one DeepSpeed rank each; both halves may share a GPU."""
    train_ranks: int = 2
    """DeepSpeed ranks on the CPU; on GPUs it is the number of `layout.train`."""
    train_threads: int = 1
    """CPU threads of each of them."""
    eval_threads: int = 1
    """CPU threads of the evaluator."""
    ring_bytes: int = 2**30
    """Memory for hidden states, on each target GPU or shared on the host; what fits stays there for
    the next epoch. 0 takes what the plan leaves free on GPUs, as far as samples need it."""
    master_port: int = 0
    """Rendezvous port of the trainer ranks; 0 picks a free one."""
    heartbeat_timeout_seconds: float = 120.0
    """A process that is silent for longer counts as dead."""
    collective_timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_one_of("layout.device", self.device, ("cpu", "cuda"))
        for name in ("target", "train"):
            self._check_gpus(name, getattr(self, name))
        engines = self.engines
        good = engines >= 1 and (not self.target or len(self.target) % engines == 0)
        allowed = "1 or more, a divisor of the number of layout.target's GPUs"
        check("layout.engines", engines, good, allowed, "give each engine as many GPUs")
        for name in ("train_ranks", "train_threads", "eval_threads"):
            check_at_least(f"layout.{name}", getattr(self, name), 1)
        check_at_least("layout.ring_bytes", self.ring_bytes, 0 if self.on_gpu else 1)
        check("layout.master_port", self.master_port, 0 <= self.master_port < 65536, "0 to 65535")
        check_at_least("layout.heartbeat_timeout_seconds", self.heartbeat_timeout_seconds, 1.0)
        check_at_least("layout.collective_timeout_seconds", self.collective_timeout_seconds, 1.0)

    def _check_gpus(self, name: str, gpus: list[int]) -> None:
        field_name = f"layout.{name}"
        if self.device == "cpu":
            check(field_name, gpus, not gpus, "[] on the CPU", "set layout.device=cuda")
            return
        good = bool(gpus) and len(set(gpus)) == len(gpus) and min(gpus) >= 0
        check(
            field_name,
            gpus,
            good,
            "one or more different GPU numbers from 0",
            f"set {field_name}=[0], or take layout=gpu1",
        )

    @property
    def on_gpu(self) -> bool:
        """Whether both halves run on GPUs."""
        return self.device == "cuda"
