"""Everything that is refused before a server is started, each with its reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

from serving.contract import contract_problems
from serving.facts import DraftFacts, Family, Gpu, TargetFacts
from serving.hooks_fold import parse_parts
from serving.hooks_kernels import CHOICES, ENVIRONMENT, PRODUCTS, parse_kernels
from serving.launch_spec import Launch
from serving.profiles import Profile, Request
from serving.split import (
    OTHER_SPLITS,
    allowed_deals,
    allowed_splits,
    listed,
    uneven,
    uneven_experts,
)

RAGGED_GRAPH_BACKENDS = frozenset({"fa3", "fa4", "trtllm_mla", "trtllm_mha"})
"""Whose verify of a ragged window is captured; others verify eagerly, five times slower.
Source: SGLang 0.5.23, `supports_ragged_verify_graph` in srt/layers/attention/*_backend.py."""
_GENERATION_OF = {
    "fa3": (Gpu.AMPERE, Gpu.HOPPER),
    "trtllm_mla": (Gpu.BLACKWELL,),
    "trtllm_mha": (Gpu.BLACKWELL,),
}


def refuse(request: Request, launch: Launch, target: TargetFacts, draft: DraftFacts | None) -> None:
    """Raises ValueError with every problem of a request; returns if there is none."""
    found = problems(request, launch, target, draft)
    if found:
        subject = f"draft {request.draft_path}" if draft is not None else request.target_path
        raise ValueError(
            f"{subject}: SGLang cannot serve it with profile={request.profile.value}: "
            f"{'; '.join(found)}"
        )


def problems(
    request: Request, launch: Launch, target: TargetFacts, draft: DraftFacts | None
) -> list[str]:
    """One sentence per problem, with its remedy."""
    made_up = launch.argument_dict().get("load_format") == "dummy"
    found = [] if draft is None else _draft_problems(request, target, draft, made_up)
    found += _profile_problems(request, launch, target, draft)
    found += _split_problems(request, launch, target, draft)
    found += _quantization_problems(request, target)
    found += _file_problems(request)
    found += _fold_problems(request)
    found += _kernel_problems(request, launch)
    return found


def _draft_problems(
    request: Request, target: TargetFacts, draft: DraftFacts, made_up: bool
) -> list[str]:
    found = []
    if target.config is not None:
        found = contract_problems(draft.config, target.config, request.context_length or None)
        if found:
            found[-1] += "; train the draft again with these settings corrected"
    if request.block_size > draft.block_size > 0:
        found.append(
            f"block_size={request.block_size} is above the trained {draft.block_size}: positions "
            f"that were never trained are never accepted; choose 1 to {draft.block_size}"
        )
    headless = not made_up and not draft.has_confidence_head
    if request.profile is Profile.DSPARK_COMPACT and headless:
        found.append(
            "the draft has no confidence head (confidence_head.proj.weight and .bias), which "
            "chooses the window in compact mode; use dspark_static or train with one"
        )
    return found


def _profile_problems(
    request: Request, launch: Launch, target: TargetFacts, draft: DraftFacts | None
) -> list[str]:
    found = []
    profile, gpu = request.profile, request.gpu
    if profile.is_dspark and draft is None:
        found.append("no draft is named; name the folder that splitserve export wrote (draft=)")
    if not profile.is_dspark and draft is not None:
        found.append("this profile takes no draft; leave draft= out or choose dspark_static")
    if profile is not Profile.PLAIN and gpu is Gpu.CPU:
        found.append("SGLang speculates on GPUs only; choose profile=plain on a CPU")
    if gpu is Gpu.CPU and target.family is Family.LING3:
        found.append("Kimi delta attention has kernels for GPUs only; serve this target on GPUs")
    if profile is Profile.NEXTN and target.num_mtp_layers == 0:
        found.append(
            "the target has no layers for multi-token prediction (num_nextn_predict_layers is 0); "
            "choose dspark_static or plain"
        )
    arguments = launch.argument_dict()
    backend = str(arguments.get("attention_backend") or "")
    fitting = _GENERATION_OF.get(backend)
    if fitting and gpu is not Gpu.OTHER and gpu not in fitting:
        found.append(
            f"attention_backend={backend} has no kernels for {gpu.value}; allowed there: "
            f"{', '.join(g.value for g in fitting)}; leave it to the profile"
        )
    ragged = backend and backend not in RAGGED_GRAPH_BACKENDS
    if profile is Profile.DSPARK_COMPACT and ragged:
        found.append(
            f"attention_backend={backend} verifies ragged windows eagerly; allowed in compact "
            f"mode: {', '.join(sorted(RAGGED_GRAPH_BACKENDS))}; use one of them or dspark_static"
        )
    environment = launch.environment_dict()
    if profile.is_dspark and environment.get("SGLANG_ENABLE_METADATA_GLUE_GRAPH") == "1":
        found.append(
            "SGLANG_ENABLE_METADATA_GLUE_GRAPH is switched off by SGLang for DSPARK; leave it out"
        )
    return found


def _split_problems(
    request: Request, launch: Launch, target: TargetFacts, draft: DraftFacts | None
) -> list[str]:
    """Heads and experts must be dealt out evenly; on a CPU, SGLang pads heads."""
    arguments = launch.argument_dict()
    if request.gpu is Gpu.CPU or OTHER_SPLITS & arguments.keys():
        return []
    tp, ep = int(arguments.get("tp_size") or 1), int(arguments.get("ep_size") or 1)
    for name, config in (("target", target.text), ("draft", draft.config if draft else {})):
        if bad := uneven(config, tp):
            return [
                f"tp={tp} does not split the {name}'s {' and '.join(bad)} evenly; allowed: "
                f"{listed(allowed_splits(config))}; choose one of these"
            ]
    # What fp8 blocks ask for is told by itself.
    if not target.fp8_block and (bad := uneven_experts(target.text, tp, ep)):
        allowed = allowed_deals(target.text, tp)
        remedy = "choose one of these" if allowed else "choose another tp"
        return [
            f"ep={ep} with tp={tp} does not divide {' and '.join(bad)} evenly; allowed for ep: "
            f"{listed(allowed)}; {remedy}"
        ]
    return []


def _quantization_problems(request: Request, target: TargetFacts) -> list[str]:
    """fp8 blocks must not be cut when experts are split over GPUs.

    Source: SGLang 0.5.23, srt/layers/quantization/fp8.py:1588.
    """
    size, block = target.text.get("moe_intermediate_size"), target.fp8_block
    if not size or not block:
        return []
    parts = max(1, request.tp_size // max(1, request.ep_size))
    if int(size) % parts == 0 and int(size) // parts % block == 0:
        return []
    return [
        f"moe_intermediate_size={size} split over {parts} GPUs is {int(size) / parts:g} columns, "
        f"no multiple of the fp8 block of {block}; deal out whole experts: "
        f"ep={request.tp_size}"
    ]


def _file_problems(request: Request) -> list[str]:
    found = []
    for name, path in (("sps", request.sps_table), ("sts", request.sts_path)):
        if path and request.profile is not Profile.DSPARK_COMPACT:
            found.append(f"{name}={path!r} has no effect without profile=dspark_compact")
        if path and not Path(path).is_file():
            found.append(f"{name}={path!r} is no file; write one with splitserve sweep")
        elif path and not _is_json(Path(path)):
            found.append(f"{name}={path!r} is no JSON; write it again with splitserve sweep")
    return found


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    return True


def _kernel_problems(request: Request, launch: Launch) -> list[str]:
    if not request.kernels:
        return []
    if request.gpu not in (Gpu.HOPPER, Gpu.BLACKWELL):
        return [f"kernels={','.join(request.kernels)} need a GPU of Hopper or later; leave it out"]
    try:
        kernels = parse_kernels(",".join(request.kernels))
    except ValueError as error:
        return [str(error).replace(f"{ENVIRONMENT}=", "kernels=")]
    backend = launch.argument_dict().get("attention_backend")
    beside_fa3 = [part for part in kernels if part in ("attention", "rope")]
    if beside_fa3 and request.profile.is_dspark and backend != "fa3":
        left = [part for part in kernels if part not in beside_fa3] or ["linear"]
        return [
            f"kernels={','.join(beside_fa3)} needs FlashAttention (fa3), attention_backend is "
            f"{backend}; write kernels={','.join(left)}"
        ]
    if set(kernels) <= {"attention", "rope", "markov", "norm"} and not request.profile.is_dspark:
        return [f"kernels={','.join(kernels)} has no effect without a DSPARK profile; leave it out"]
    variables = os.environ | launch.environment_dict()
    if set(kernels) & set(PRODUCTS) and (choices := variables.get(CHOICES)):
        from serving.hooks_linear import KeptChoices

        try:
            KeptChoices(Path(choices))
        except ValueError as error:
            return [str(error)]
    return []


def _fold_problems(request: Request) -> list[str]:
    if not request.fold:
        return []
    if request.profile is not Profile.DSPARK_STATIC:
        return ["fold has no effect without profile=dspark_static"]
    try:
        parse_parts("" if request.fold == ("all",) else ",".join(request.fold))
    except ValueError as error:
        return [str(error)]
    return []
