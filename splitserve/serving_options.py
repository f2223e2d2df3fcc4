"""What the commands around a server take, and the starts that it comes down to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serving.facts import Gpu, detect_gpu, read_target
from serving.hooks_fold import ENVIRONMENT as FOLD
from serving.hooks_kernels import ENVIRONMENT as KERNELS
from serving.launch_spec import Launch, Setting
from serving.profiles import MEASURING, Profile, Request, build_launch
from serving.session import TRACE_TOKENS
from serving.surface import check_surface
from serving.version import require_sglang
from serving.workload import Prompt, TargetTokenizer, random_prompts, read_prompts
from splitserve.errors import UserError, suggest
from splitserve.target.hub import HUB_NAME

TWO_ENGINES_MEMORY = 0.4
CONTEXT_MARGIN_TOKENS = 64
DEFAULT_VOCABULARY = 32000


@dataclass(frozen=True)
class ServerOptions:
    """A server: one at an address, or what one is started with."""

    url: str = ""
    """Address of a running one; the rest then only says what it serves."""
    profile: str = "plain"
    """plain, nextn, dspark_static or dspark_compact."""
    target: str = ""
    """Folder or hub name."""
    draft: str = ""
    """Folder of an exported draft."""
    gpu: str = ""
    """ampere, hopper, blackwell, cpu, other; empty asks the machine."""
    tp: int = 1
    """GPUs that the target is split over."""
    ep: int = 1
    """GPUs that whole experts are dealt over."""
    block_size: int = 0
    """Drafts per round; 0 takes the draft's own."""
    context_length: int = 0
    """Longest prompt and answer together, tokens; 0 leaves it to the target or the workload."""
    sps: str = ""
    """Steps-per-second table for dspark_compact."""
    sts: str = ""
    """Temperatures for dspark_compact."""
    fold: str = "auto"
    """Parts of a DSPARK step to put into its graphs: all, none, or a list with commas; auto is all
    where that has been measured to pay."""
    kernels: str = "auto"
    """Kernels of our own in place of SGLang's: all, none, or some of attention, linear, mlp,
    markov, rope and norm, with commas; auto as above."""
    args: dict[str, Any] = field(default_factory=dict)
    """SGLang arguments of one's own: args.NAME=VALUE."""
    env: dict[str, Any] = field(default_factory=dict)
    """Environment variables of one's own: env.NAME=VALUE."""

    def __post_init__(self) -> None:
        for name, least in (("tp", 1), ("ep", 1), ("block_size", 0), ("context_length", 0)):
            _at_least(name, getattr(self, name), least)
        check_address("url", self.url)


@dataclass(frozen=True)
class MeasureOptions(ServerOptions):
    """A measurement of a server."""

    against: dict[str, Any] = field(default_factory=dict)
    """How a second server differs: against.profile=plain, against.env.NAME=VALUE."""
    prompts: str = ""
    """JSON lines with messages; empty takes random tokens."""
    domains: list[str] = field(default_factory=list)
    """Of the prompts; empty takes all."""
    number: int = 4
    """Prompts."""
    input_tokens: int = 8192
    """Of a random prompt."""
    output_tokens: int = 1024
    """Of an answer; random prompts are answered to exactly that length."""
    temperature: float = 0.0
    concurrency: list[int] = field(default_factory=lambda: [1])
    """Requests at once, one measurement each."""
    rounds: int = 3
    """Of a comparison."""
    counters: str = ""
    """Value of SPLITSERVE_AUDIT in the environment of a server at an address."""
    folder: str = "serving"
    """For logs, traces and counters."""
    out: str = ""
    """JSON file for the figures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("number", "input_tokens", "output_tokens"):
            _at_least(name, getattr(self, name), 1)
        _at_least("rounds", self.rounds, 2)
        _at_least("temperature", self.temperature, 0)
        if not self.concurrency or min(self.concurrency) < 1:
            raise UserError(
                "concurrency", self.concurrency, "numbers from 1", "write for example [1,4]"
            )


def _at_least(name: str, value: float, least: int) -> None:
    if not least <= value < math.inf:
        raise UserError(name, value, f"{least} or more", f"correct {name}")


def check_address(name: str, url: str) -> None:
    """Refuse what cannot be a server's address; an empty one is none.

    Raises:
        UserError: it is no http address.
    """
    try:
        parts = urlsplit(url)
        good = not url or (parts.scheme in ("http", "https") and bool(parts.hostname))
        # Reading a port that is no number, or too large, raises.
        good = good and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UserError(name, url, "an address", "write for example http://127.0.0.1:30000")


def request_of(options: ServerOptions) -> Request:
    """The request that the options stand for.

    Raises:
        UserError: an unknown profile or GPU generation, or no target.
    """
    names = [p.value for p in Profile]
    if options.profile not in names:
        raise UserError(
            "profile", options.profile, ", ".join(names), suggest(options.profile, names)
        )
    generations = [g.value for g in Gpu]
    if options.gpu and options.gpu not in generations:
        raise UserError(
            "gpu", options.gpu, ", ".join(generations), suggest(options.gpu, generations)
        )
    if not options.target:
        raise UserError("target", "", "a model folder or hub name", "name it with target=FOLDER")
    if not Path(options.target).is_dir() and not HUB_NAME.fullmatch(options.target):
        raise UserError("target", options.target, "a model folder or hub name", "check the path")
    gpu = Gpu(options.gpu) if options.gpu else detect_gpu()[0]
    return Request(
        Profile(options.profile),
        options.target,
        options.draft,
        gpu,
        options.tp,
        options.ep,
        options.block_size,
        options.context_length,
        options.sps,
        options.sts,
        _names(options.fold),
        _names(options.kernels),
        options.args,
        options.env,
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    return () if names == ("none",) else names


def launch_of(options: ServerOptions) -> Launch:
    """The start of a server to serve with. Raises ValueError with every reason against it."""
    launch = build_launch(request_of(options))
    require_sglang()
    check_surface(launch)
    return launch


def about_steps(options: ServerOptions, launch: Launch) -> str:
    """What the profile has put into this server's steps that is not SGLang's, or has left out."""
    if options.profile != Profile.DSPARK_STATIC.value or "auto" not in (
        options.fold,
        options.kernels,
    ):
        return ""
    if {FOLD, KERNELS} & launch.environment_dict().keys():
        return (
            "this server's steps are shortened by this package, as measured for such targets; "
            "fold=none kernels=none leaves them to SGLang (docs/serving.md)"
        )
    for kernels in ("all", "none"):
        try:
            launch_of(replace(options, fold="all", kernels=kernels))
        except ValueError:
            continue
        asked = "fold=all" + " kernels=all" * (kernels == "all")
        return (
            f"{asked} can shorten a step of this server and is off, as it has not been measured "
            "to; splitserve gate and bench show what it changes (docs/serving.md)"
        )
    return ""


def measuring_launch(options: MeasureOptions, *, longest: int, beside: bool = False) -> Launch:
    """The start of an engine to measure.

    Args:
        longest: tokens of the longest request.
        beside: another engine shares the GPU.

    Raises:
        ValueError: it cannot be served; names every reason.
    """
    needed = longest + CONTEXT_MARGIN_TOKENS
    # A trace decodes longer than the workload, as far as the target goes.
    text = read_target(options.target).text
    limit = text.get("max_position_embeddings") or needed
    stretched = text.get("rope_scaling") or text.get("rope_parameters")
    if needed > int(limit) and not options.context_length and not stretched:
        raise UserError(
            "input_tokens" if not options.prompts else "output_tokens",
            options.input_tokens if not options.prompts else options.output_tokens,
            f"prompt and answer within {int(limit) - CONTEXT_MARGIN_TOKENS} tokens, as the "
            f"target has {limit} positions; the longest has {longest}",
            "lower input_tokens or output_tokens, or set context_length",
        )
    length = options.context_length or max(needed, min(needed + TRACE_TOKENS, int(limit)))
    most = max(options.concurrency)
    values: dict[str, Any] = {
        "max_running_requests": max(most, 1),
        "cuda_graph_bs_decode": tuple(graph_sizes(most)),
        "max_total_tokens": (most + 1) * length,
    }
    if beside:
        values["mem_fraction_static"] = TWO_ENGINES_MEMORY
    request = request_of(replace(options, context_length=length))
    profile = build_launch(request)
    # One's own arguments come after those of a measurement.
    own = [setting for setting in profile.arguments if setting.name in options.args]
    measured = [Setting(n, v, "for the measurement") for n, v in values.items()]
    launch = profile.plus([*MEASURING, *measured, *own])
    require_sglang()
    check_surface(launch)
    return launch


def graph_sizes(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, which is among them."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sizes if most <= 1 else [*sizes, most]


def second_side(options: MeasureOptions) -> MeasureOptions:
    """The options of the second server.

    Raises:
        UserError: an option that servers do not have.
    """
    known = [item.name for item in fields(ServerOptions)]
    changes = dict(options.against)
    for name in changes:
        if name not in known:
            raise UserError(
                f"against.{name}", changes[name], "an option of a server", suggest(name, known)
            )
    for name in ("args", "env"):
        if name in changes:
            changes[name] = {**getattr(options, name), **changes[name]}
    if changes.get("profile") in ("plain", "nextn") and "draft" not in changes:
        changes["draft"] = ""
    return replace(options, **changes, against={})


def sides_of(options: MeasureOptions) -> tuple[MeasureOptions, MeasureOptions]:
    """Both servers of a comparison.

    Raises:
        UserError: an option that servers do not have, or both come to the same server.
        ValueError: one of them cannot be served.
    """
    first, second = replace(options, against={}), second_side(options)
    if not options.url and build_launch(request_of(first)) == build_launch(request_of(second)):
        raise UserError(
            "against",
            options.against,
            "what makes the second server another than the first; both come to the same settings",
            "write for example fold=none kernels=none against.fold=all",
        )
    return first, second


def prompts_of(options: MeasureOptions, tokenizer: TargetTokenizer | None) -> tuple[Prompt, ...]:
    """The prompts of a measurement. Raises ValueError."""
    if not options.prompts:
        vocabulary = read_target(options.target).text.get("vocab_size") or DEFAULT_VOCABULARY
        return random_prompts(options.number, options.input_tokens, int(vocabulary))
    if not options.target:
        raise UserError("target", "", "a model folder or hub name", "its chat template is needed")
    tokenizer = tokenizer or TargetTokenizer(options.target)
    return read_prompts(
        Path(options.prompts),
        tokenizer.encode,
        domains=options.domains,
        number=options.number,
    )
