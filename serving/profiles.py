"""Decode profiles: the settings that make SGLang fast for a kind of target on a kind of GPU.

Every setting carries its reason. For Ling-3 on four Blackwell GPUs the settings are those of the
published run; elsewhere the best that exists there. One function builds them all, for the `serve`
command, for the launch line of a finished run and for the engines that measure.

Sources: SGLang 0.5.23, srt/arg_groups/speculative_hook.py, srt/environ.py and
srt/layers/attention/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from serving import hooks_fold, hooks_kernels
from serving.facts import Family, Gpu, TargetFacts, read_draft, read_target
from serving.launch_spec import Launch, Setting, given


class Profile(Enum):
    """How tokens are decoded."""

    PLAIN = "plain"
    """The target alone."""
    NEXTN = "nextn"
    """Drafts by the target's own multi-token prediction layers."""
    DSPARK_STATIC = "dspark_static"
    """Drafts by a DSpark draft; every round verifies all of them."""
    DSPARK_COMPACT = "dspark_compact"
    """Drafts by a DSpark draft; a round verifies those that its confidence head trusts."""

    @property
    def is_dspark(self) -> bool:
        """Whether a draft folder is needed."""
        return self in (Profile.DSPARK_STATIC, Profile.DSPARK_COMPACT)


AUTO = ("auto",)
"""Of `fold` and `kernels`: all where they have been measured to pay."""
NEXTN_STEPS = 5
NEXTN_DRAFT_TOKENS = NEXTN_STEPS + 1

RADIX_OFF = Setting(
    "disable_radix_cache", True, "a cached prefix keeps the draft's KV of another request's rounds"
)
MEASURING = (
    Setting("skip_tokenizer_init", True, "requests are token ids; detokenizing is not measured"),
    Setting("grammar_backend", "none", "no request is constrained"),
    Setting("sampling_backend", "pytorch", "greedy needs no kernel; FlashInfer may be missing"),
    Setting("disable_radix_cache", True, "a repeated prompt must not be answered from the cache"),
    Setting("disable_prefill_cuda_graph", True, "starts a minute sooner; decoding is as before"),
    Setting("log_level", "warning", "the log is not what is measured"),
)
"""What engines are started with that only measure."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be served, and how."""

    profile: Profile
    target_path: str
    draft_path: str = ""
    gpu: Gpu = Gpu.OTHER
    tp_size: int = 1
    """GPUs that the target is split over."""
    ep_size: int = 1
    """GPUs that whole experts are dealt over."""
    block_size: int = 0
    """Drafts per round; 0 takes the draft's own."""
    context_length: int = 0
    """Longest prompt and answer together, tokens; 0 takes the target's."""
    sps_table: str = ""
    """Steps-per-second table, for dspark_compact."""
    sts_path: str = ""
    """Temperatures of the confidence head, for dspark_compact."""
    fold: tuple[str, ...] = ()
    """Parts of a DSPARK step to put into its graphs (`serving.hooks_fold`); "all" for all, and
    with SGLang's own switches for the same seams; "auto" leaves it to the profile."""
    kernels: tuple[str, ...] = ()
    """Kernels of our own (`serving.hooks_kernels`); "all" for all, "auto" as above."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """SGLang arguments of one's own, by Python name; they replace the profile's."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Environment variables of one's own."""


def build_launch(request: Request) -> Launch:
    """The settings of a request.

    Raises:
        ValueError: the request cannot be served; names every reason.
    """
    from serving.refusals import refuse

    target = read_target(request.target_path)
    draft = read_draft(request.draft_path) if request.draft_path else None
    request = _decided(request, target)
    launch = settings_for(request, target)
    refuse(request, launch, target, draft)
    return launch


def _decided(request: Request, target: TargetFacts) -> Request:
    """With `auto` as what it comes to.

    Measured shorter, gates green: static steps of Qwen3, Llama and Ling-3 targets on one H200, with
    FlashAttention 3 (benchmarks/results/serving_8b.json, serving_smollm2.json, serving_ling3.json).
    """
    pays = (
        request.profile is Profile.DSPARK_STATIC
        and target.family in (Family.DENSE, Family.LING3)
        and request.gpu is Gpu.HOPPER
        and request.tp_size == 1
        and request.arguments.get("attention_backend", "fa3") == "fa3"
    )
    chosen = ("all",) if pays else ()
    return replace(
        request,
        fold=chosen if request.fold == AUTO else request.fold,
        kernels=chosen if request.kernels == AUTO else request.kernels,
    )


def settings_for(request: Request, target: TargetFacts) -> Launch:
    """The settings alone, nothing refused and `auto` decided before."""
    arguments = [Setting("model_path", request.target_path, "the target")]
    if request.profile.is_dspark:
        arguments += [
            Setting("speculative_algorithm", "DSPARK", "the draft is a DSpark draft"),
            Setting("speculative_draft_model_path", request.draft_path, "the draft"),
        ]
    arguments.append(Setting("tp_size", request.tp_size, "GPUs that the target is split over"))
    if request.ep_size > 1:
        arguments.append(Setting("ep_size", request.ep_size, "whole experts on each GPU"))
    if request.context_length:
        arguments.append(
            Setting("context_length", request.context_length, "longest request, as asked")
        )
    arguments += _attention(target.family, request.gpu)
    arguments += _communication(target.family, request)
    environment = _kernels(target.family, request)
    more_arguments, more_environment = _speculation(target.family, request)
    launch = Launch(request.profile.value, tuple(arguments), tuple(environment))
    launch = launch.plus(more_arguments, [*more_environment, *_folding(request.fold)])
    if request.kernels:
        names = ",".join(request.kernels)
        why = "kernels of our own where they are faster (kernels=none: SGLang's)"
        launch = launch.plus([], [Setting(hooks_kernels.ENVIRONMENT, names, why)])
    return launch.plus(given(request.arguments), given(request.environment))


def _attention(family: Family, gpu: Gpu) -> list[Setting]:
    if gpu is Gpu.CPU:
        return [
            Setting("device", "cpu", "there is no GPU"),
            Setting("attention_backend", "torch_native", "the only one that runs without kernels"),
            Setting("sampling_backend", "pytorch", "FlashInfer needs a GPU"),
            Setting("disable_overlap_schedule", True, "nothing to overlap with on a CPU"),
        ]
    if family is Family.LING3 and gpu is Gpu.BLACKWELL:
        why = "MLA decode and verify in one kernel, lengths stay on the GPU (published run)"
        return [Setting("attention_backend", "trtllm_mla", why)]
    if family is Family.LING3 and gpu is Gpu.HOPPER:
        why = "lengths stay on the GPU; FlashInfer's MLA would read them back every step"
        return [Setting("attention_backend", "fa3", why)]
    if family is Family.DENSE and gpu in (Gpu.AMPERE, Gpu.HOPPER):
        why = "host runs ahead; at 8,192 tokens of context a DSPARK step is 4 x shorter than triton"
        return [Setting("attention_backend", "fa3", why)]
    if family is Family.DENSE and gpu is Gpu.BLACKWELL:
        why = "lengths stay on the GPU, and a verify of any width is captured"
        return [Setting("attention_backend", "trtllm_mha", why)]
    return []


def _communication(family: Family, request: Request) -> list[Setting]:
    fused = request.gpu in (Gpu.HOPPER, Gpu.BLACKWELL) and request.tp_size > 1
    if family is not Family.LING3 or not fused:
        return []
    why = "all-reduce, residual and norm in one kernel; not automatic for this architecture"
    return [Setting("flashinfer_allreduce_fusion_backend", "auto", why)]


def _kernels(family: Family, request: Request) -> list[Setting]:
    if family is not Family.LING3 or request.profile is Profile.PLAIN or request.gpu is Gpu.CPU:
        return []
    if request.profile is Profile.DSPARK_COMPACT:
        # The fused kernel runs only where no ragged layout is given.
        return []
    why = "convolution, gates and delta rule of a whole chain in one kernel"
    return [Setting("SGLANG_OPT_FUSED_KDA_VERIFY", True, why)]


def _speculation(family: Family, request: Request) -> tuple[list[Setting], list[Setting]]:
    profile = request.profile
    if profile is Profile.PLAIN:
        return [], []
    if profile is Profile.NEXTN:
        arguments = [
            Setting("speculative_algorithm", "NEXTN", "drafts by the target's own MTP layers"),
            Setting("speculative_num_steps", NEXTN_STEPS, "drafts one after another"),
            Setting("speculative_eagle_topk", 1, "a chain: graphs and KDA verify ask for it"),
            Setting("speculative_num_draft_tokens", NEXTN_DRAFT_TOKENS, "the drafts and the bonus"),
            Setting("mem_fraction_static", 0.85, "room for the glue graphs (published run)"),
        ]
        glue = "attention metadata of the many small forwards in one graph each"
        return arguments, [Setting("SGLANG_ENABLE_METADATA_GLUE_GRAPH", True, glue)]
    arguments = [RADIX_OFF] if family is Family.LING3 else []
    if request.block_size:
        why = "drafts per round; fewer than trained are allowed"
        arguments.append(Setting("speculative_dspark_block_size", request.block_size, why))
    static = profile is Profile.DSPARK_STATIC
    mode = "static" if static else "compact"
    why = (
        "fixed window, fused KDA verify" if static else "window by confidence, accept in the graph"
    )
    environment = [Setting("SGLANG_RAGGED_VERIFY_MODE", mode, why)]
    for name, value, reason in (
        ("speculative_dspark_sps_table_path", request.sps_table, "cost of a step by its tokens"),
        ("speculative_dspark_confidence_sts_path", request.sts_path, "calibrated confidences"),
    ):
        if value:
            arguments.append(Setting(name, value, reason))
    return arguments, environment


def _folding(fold: tuple[str, ...]) -> list[Setting]:
    if not fold:
        return []
    everything = fold == ("all",)
    parts = hooks_fold.PARTS if everything else fold
    why = "less host time between the graphs of a step (fold=none: as SGLang has it)"
    settings = [Setting(hooks_fold.ENVIRONMENT, ",".join(parts), why)]
    if everything:
        settings += [Setting(name, True, r) for name, r in hooks_fold.SGLANG_SWITCHES.items()]
    elif "glue" in parts:
        name = hooks_fold.GLUE_SWITCH
        settings.append(Setting(name, True, hooks_fold.SGLANG_SWITCHES[name]))
    return settings
