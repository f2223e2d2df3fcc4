"""Which optimizations of a decode path are really at work, and how that is known.

Evidence comes from the process: kernel names and overlaps in a short trace, and the counters of
`serving.hooks_audit`. SGLang's resolved arguments are the weakest kind, and marked as such: they
say what was decided, not what ran.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from serving.facts import Family
from serving.hooks_kernels import parse_kernels
from serving.trace import StepFacts


class State(Enum):
    """What was found."""

    ACTIVE = "active"
    OFF = "off"
    UNKNOWN = "unknown"


class Source(Enum):
    """How it is known, strongest first."""

    COUNTER = "counter"
    TRACE = "trace"
    ARGUMENT = "argument (weak)"
    NONE = "no evidence"


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of a running server."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's resolved ones."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Of `serving.hooks_audit`, over all ranks."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    kernels: frozenset[str] = frozenset()
    """Names in steady decode steps."""
    step: StepFacts | None = None
    """None without a trace."""
    family: Family = Family.OTHER

    @property
    def algorithm(self) -> str:
        """DSPARK, EAGLE (which NEXTN resolves to), or empty."""
        return str(self.arguments.get("speculative_algorithm") or "")


Finding = tuple[State, Source, str]
UNSEEN: Finding = (State.UNKNOWN, Source.NONE, "neither counted nor traced")


@dataclass(frozen=True, slots=True)
class Check:
    """One optimization of the path."""

    name: str
    wanted: Callable[[Observed], bool]
    look: Callable[[Observed], Finding]
    cost: str
    """What it costs when off."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    wanted: bool
    state: str
    source: str
    evidence: str
    cost_when_off: str

    @property
    def is_problem(self) -> bool:
        """Wanted, and known to be off."""
        return self.wanted and self.state == State.OFF.value


def audit(observed: Observed) -> list[Row]:
    """A row for every optimization; those of other paths are not wanted."""
    rows = []
    for check in CHECKS:
        state, source, evidence = check.look(observed)
        rows.append(
            Row(
                check.name,
                check.wanted(observed),
                state.value,
                source.value,
                evidence,
                check.cost,
            )
        )
    return rows


def read_counters(stem: str) -> tuple[dict[str, int], dict[str, Any]]:
    """The counters of all ranks: counts summed, facts of rank 0.

    Raises:
        ValueError: no rank has written any.
    """
    path = Path(stem)
    files = sorted(path.parent.glob(f"{path.name}.*.json"))
    found = [json.loads(file.read_text()) for file in files]
    # Only schedulers that decoded have counts.
    found = [one for one in found if one["counts"]]
    if not found:
        raise ValueError(
            f"counters={stem!r} has no file of a rank that decoded; allowed: the value of "
            "SPLITSERVE_AUDIT in the server's environment; start the server with it and send a "
            "request"
        )
    found.sort(key=lambda one: one["facts"].get("tp_rank", 0))
    counts: dict[str, int] = {}
    for one in found:
        for name, value in one["counts"].items():
            counts[name] = counts.get(name, 0) + value
    return counts, found[0]["facts"]


def rows_to_dicts(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Ready for JSON."""
    return [{**asdict(row), "is_problem": row.is_problem} for row in rows]


# --- what to look at -----------------------------------------------------------------------------


def _always(observed: Observed) -> bool:
    return True


def _speculates(observed: Observed) -> bool:
    return bool(observed.algorithm)


def _dspark(observed: Observed) -> bool:
    return observed.algorithm == "DSPARK"


def _ling(observed: Observed) -> bool:
    return observed.family is Family.LING3


def _asks_for(part: str) -> Callable[[Observed], bool]:
    return lambda observed: part in parse_kernels(str(observed.facts.get("own_kernels", "")))


def _both(*conditions: Callable[[Observed], bool]) -> Callable[[Observed], bool]:
    return lambda observed: all(condition(observed) for condition in conditions)


def _several_ranks(observed: Observed) -> bool:
    return int(observed.arguments.get("tp_size") or 1) > 1


def _bf16_experts(observed: Observed) -> bool:
    return _ling(observed) and not observed.arguments.get("quantization")


def _kernel(pattern: str) -> Callable[[Observed], Finding]:
    """Active where a kernel of that name ran in a decode step."""
    compiled = re.compile(pattern, re.IGNORECASE)

    def look(observed: Observed) -> Finding:
        if observed.step is None:
            return UNSEEN
        found = sorted(name for name in observed.kernels if compiled.search(name))
        if found:
            return State.ACTIVE, Source.TRACE, f"kernel {found[0][:80]}"
        return State.OFF, Source.TRACE, f"no kernel like {pattern}"

    return look


def _fact(name: str, *, good: bool, text: str) -> Callable[[Observed], Finding]:
    """Active where a fact of the counters has that value."""

    def look(observed: Observed) -> Finding:
        if name not in observed.facts:
            return UNSEEN
        value = bool(observed.facts[name])
        state = State.ACTIVE if value is good else State.OFF
        return state, Source.COUNTER, f"{text}: {'yes' if value else 'no'}"

    return look


def _share(*kinds: str) -> Callable[[Observed], Finding]:
    """Active where almost all of these ran from graphs."""

    def look(observed: Observed) -> Finding:
        graph = sum(observed.counts.get(f"{kind}_graph", 0) for kind in kinds)
        eager = sum(observed.counts.get(f"{kind}_eager", 0) for kind in kinds)
        if not graph + eager:
            return UNSEEN
        # A batch beyond the captured sizes may go eagerly now and then.
        state = State.ACTIVE if eager <= 0.02 * (graph + eager) else State.OFF
        return state, Source.COUNTER, f"{graph} from graphs, {eager} eagerly"

    return look


def _glue(name: str) -> Callable[[Observed], Finding]:
    def look(observed: Observed) -> Finding:
        if name not in observed.facts:
            return UNSEEN
        found = observed.facts[name]
        if not found or not found["graph"]:
            return State.OFF, Source.COUNTER, "prepared from the host every step"
        text = f"{found['graph']} replays, {found['eager']} eagerly"
        state = State.ACTIVE if found["eager"] <= 0.02 * found["graph"] + 8 else State.OFF
        return state, Source.COUNTER, text

    return look


def _overlap(observed: Observed) -> Finding:
    loop = observed.facts.get("event_loop")
    if loop:
        state = State.ACTIVE if loop == "overlap" else State.OFF
        return state, Source.COUNTER, f"event loop: {loop}"
    if "disable_overlap_schedule" not in observed.arguments:
        return UNSEEN
    off = bool(observed.arguments["disable_overlap_schedule"])
    text = f"disable_overlap_schedule={off}"
    return State.OFF if off else State.ACTIVE, Source.ARGUMENT, text


def _no_reads(observed: Observed) -> Finding:
    if observed.step is None:
        return UNSEEN
    waits = observed.step.synchronizations
    # The overlapped loop waits once for the step before, which has long been done.
    state = State.ACTIVE if waits <= 1.2 else State.OFF
    return state, Source.TRACE, f"{waits:.2f} waiting calls a step"


def _graphs(observed: Observed) -> Finding:
    if observed.step is None:
        return UNSEEN
    step = observed.step
    text = f"{step.graphs:.1f} graphs, {step.eager_kernels:.1f} kernels one by one, a step"
    return State.ACTIVE if step.eager_kernels <= 8 else State.OFF, Source.TRACE, text


def _pdl(observed: Observed) -> Finding:
    if observed.step is None:
        return UNSEEN
    number = observed.step.overlapped_kernels
    state = State.ACTIVE if number >= 1 else State.OFF
    return state, Source.TRACE, f"{number:.1f} kernels a step began before the one ahead ended"


def _fusion(observed: Observed) -> Finding:
    traced = _kernel(r"allreduce_fusion|allreduce.*(rms|norm)|mnnvl.*norm")(observed)
    if traced[0] is not State.UNKNOWN:
        return traced
    backend = observed.arguments.get("flashinfer_allreduce_fusion_backend")
    text = f"flashinfer_allreduce_fusion_backend={backend}"
    return State.ACTIVE if backend else State.OFF, Source.ARGUMENT, text


def _bf16_head(observed: Observed) -> Finding:
    if "enable_fp32_lm_head" not in observed.arguments:
        return UNSEEN
    wide = bool(observed.arguments["enable_fp32_lm_head"])
    text = f"enable_fp32_lm_head={wide}"
    return State.OFF if wide else State.ACTIVE, Source.ARGUMENT, text


def _swiglu(observed: Observed) -> Finding:
    if observed.step is None:
        return UNSEEN
    found = sorted(n for n in observed.kernels if re.search(r"silu|act_and_mul|swiglu", n))
    if found:
        return State.OFF, Source.TRACE, f"kernel {found[0][:80]}"
    return State.ACTIVE, Source.TRACE, "no activation kernel runs"


def _host_plans(observed: Observed) -> Finding:
    backend = observed.facts.get("attention")
    if not backend:
        return UNSEEN
    if "FlashInfer" not in str(backend):
        return State.ACTIVE, Source.COUNTER, f"{backend} has no plan made on the host"
    return State.OFF, Source.COUNTER, f"{backend} plans on the host each step"


CHECKS: tuple[Check, ...] = (
    Check("overlap scheduling", _always, _overlap, "the scheduler's work adds to every step"),
    Check(
        "lengths stay on the GPU",
        _always,
        _fact("needs_cpu_seq_lens", good=False, text="a backend asks for CPU sequence lengths"),
        "the host cannot run ahead: a read-back every step",
    ),
    Check("no blocking read", _always, _no_reads, "the GPU runs dry once a wait"),
    Check("target from graphs", _always, _share("verify", "decode"), "milliseconds of launches"),
    Check("draft from graphs", _dspark, _share("draft"), "a launch a kernel of the draft"),
    Check("graphs only", _always, _graphs, "5-10 us of host time a kernel"),
    Check(
        "proposal in the draft graph",
        _dspark,
        _fact("proposal_in_graph", good=True, text="the Markov block is the graph's tail"),
        "a launch a drafted token",
    ),
    Check(
        "our own decode attention",
        _asks_for("attention"),
        _kernel(r"decode_attention_kernel"),
        "two launches and a copy more a layer",
    ),
    Check(
        "norms, rotation and store in one launch",
        _asks_for("rope"),
        _kernel(r"rope_store_kernel"),
        "two launches more a layer, and a copy with FlashAttention",
    ),
    Check(
        "our own products of few rows",
        _asks_for("linear"),
        _kernel(r"skinny_linear"),
        "weights at cuBLAS's bandwidth; also off where that was the faster",
    ),
    Check(
        "norms inside the products around them",
        _asks_for("norm"),
        _kernel(r"skinny_linear_add_kernel"),
        "two launches more a layer, in which no weight is read",
    ),
    Check("accept in the verify graph", _dspark, _share("accept"), "some ten launches a step"),
    Check(
        "draft keys and values in the verify graph",
        _dspark,
        _fact("commit_in_graph", good=True, text="the verify graph writes them"),
        "two products, a norm and a store from the host",
    ),
    Check(
        "verify window from the draft graph",
        _dspark,
        _fact("verify_ids_in_graph", good=True, text="the draft graph writes it"),
        "one concatenation from the host",
    ),
    Check(
        "lengths relayed in the verify graph",
        _dspark,
        _fact("relayed_in_graph", good=True, text="the next step's inputs come from the graph"),
        "two scatters from the host",
    ),
    Check(
        "metadata glue, target", _speculates, _glue("verify_glue"), "host work before the verify"
    ),
    Check("metadata glue, draft", _dspark, _glue("draft_glue"), "host work before the draft"),
    Check("host-fed attention plans", _speculates, _host_plans, "a read-back for each plan"),
    Check("PDL", _always, _pdl, "1-2 us between any two kernels"),
    Check(
        "fused draft KV write",
        _dspark,
        _kernel(r"fused_kv_norm_rope_write"),
        "three kernels a draft layer",
    ),
    Check(
        "all-reduce fusion",
        _several_ranks,
        _fusion,
        "an add and a norm kernel behind each all-reduce",
    ),
    Check(
        "fused KDA chain verify",
        _both(_ling, _speculates),
        _kernel(r"fused_kda_conv|kda_decode_mtp"),
        "convolution, gates and recurrence apart in each KDA layer",
    ),
    Check(
        "stage-then-commit of recurrent state",
        _both(_ling, _dspark),
        _fact("state_commit_after_verify", good=True, text="committed once after the verify"),
        "states copied for each token",
    ),
    Check(
        "pair-axis MoE align",
        _ling,
        _kernel(r"moe_align_small|moe_align_single"),
        "a multi-kernel sort for a handful of rows",
    ),
    Check(
        "SwiGLU in the up-GEMM epilogue",
        _bf16_experts,
        _swiglu,
        "an activation kernel a layer; SGLang has it for bf16 experts without a limit only",
    ),
    Check("bf16 router gate", _ling, _kernel(r"router_gate_matvec"), "a float32 product a layer"),
    Check("bf16 lm_head", _always, _bf16_head, "twice the bytes of the widest product"),
)
