"""Figures of decoding on one GPU: `python -m benchmarks.serving MODEL [--parts ...]`.

Models: `smollm2` (a folder and a trained draft of one's own, prompts of a file), `8b` (random, the
sizes of Qwen3-8B, a draft of 5 layers and blocks of 7), `ling3_tiny` and `ling3` (random Ling-3, a
draft of 5 layers). Random weights are made up by SGLang while it starts: nothing is written but
two config.json, and nothing is read. Drafts of random weights are accepted by chance at most: there
a step is a token.

Parts:

    pair      SGLang's default static verify against the same with everything folded, in turn:
              step times, the gates between them, and a census of both; `--kernels all` lets the
              changed side run kernels of our own too
    plain     the target alone
    compact   verification by confidence
    nextn     drafts by the target's own MTP layer (ling3)
    each      the default against each single switch, in turn

As many engines as `--beside` says are on the GPU at a time, and rest but for the one that is asked:
with more, more of them start at once. Random ones of 8 billion parameters fit five times.

Writes `serving_MODEL.json` into `--folder` (by default benchmarks/results) and prints it. `--add`
takes in the figures of earlier files, so that parts can be measured in several calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.options import positive, record_file, two_or_more
from benchmarks.record import ROOT, write_record
from dspark.config import DraftConfig
from serving.bench import Comparison, Run, Workload, compare
from serving.gates import GREEDY_TOKENS, gates_to_dict, gather, judge
from serving.hooks_kernels import CHOICES, PRODUCTS, parse_kernels
from serving.server import Server, ServerError, Turns
from serving.session import summarize_traces, traced
from serving.workload import TargetTokenizer
from splitserve.serving_options import MeasureOptions
from splitserve.serving_run import open_server, run_warm, warm_up, workload_of

MEMORY = 0.9
TIMED_PROMPTS = 12
PARTS = ("pair", "plain", "compact", "nextn", "each")
CONTEXTS = (512, 8192)
LING3_MID = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 5120,
    "num_hidden_layers": 18,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "moe_shared_expert_intermediate_size": 768,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1024,
    "num_nextn_predict_layers": 1,
}
"""About 14 billion parameters: as large as fits four times."""
SINGLE: dict[str, dict[str, Any]] = {
    "accept": {"fold": "accept"},
    "accept_tail": {"fold": "accept", "env": {"SGLANG_DSPARK_FUSED_ACCEPT_TAIL": True}},
    "accept_commit": {"fold": "accept,commit"},
    "accept_commit_relay": {"fold": "accept,commit,relay"},
    "glue": {"fold": "glue"},
    "kernels_attention": {"kernels": "attention"},
    "kernels_linear": {"kernels": "linear"},
    "kernels_mlp": {"kernels": "mlp"},
    "kernels_markov": {"kernels": "markov"},
    "kernels_rope": {"kernels": "rope"},
    "kernels_norm": {"kernels": "norm"},
    "greedy_draft": {"env": {"SGLANG_DSPARK_USE_GREEDY_DRAFT": True}},
    "pages_of_64": {"args": {"page_size": 64}},
    "mid_fold": {"env": {"SGLANG_OPT_DSV41_DSPARK_MID_FOLD": True}},
    "prepare_once": {"env": {"SGLANG_OPT_DSV41_DSPARK_PREPARE_INPUTS_ONCE": True}},
    "skip_prefilled": {"env": {"SGLANG_OPT_DSV41_DSPARK_SKIP_PREFILLED_INPUTS": True}},
    "fill_fast_path": {"env": {"SGLANG_OPT_CUDA_GRAPH_FILL_FAST_PATH": True}},
    "plan_stream": {"env": {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": True}},
    "recv_interval": {"args": {"scheduler_recv_interval": 8}},
    "stream_interval": {"args": {"stream_interval": 8}},
    "fused_kda_verify_off": {"env": {"SGLANG_OPT_FUSED_KDA_VERIFY": False}},
}
"""What each comparison of the part `each` changes. Two only say where time goes: answers in pieces
of 8 tokens, and requests looked for every 8 steps, are not what one serves with."""
EACH = [name for name in SINGLE if name != "fused_kda_verify_off"]
"""Compared by default; Kimi delta attention is Ling-3's alone."""


def target_config(model: str) -> dict[str, Any]:
    """The config.json of a random target."""
    name = "qwen3_8b_random" if model == "8b" else "ling3_tiny"
    text = (ROOT / "configs" / "target" / f"{name}.yaml").read_text()
    config: dict[str, Any] = yaml.safe_load(text)["random_config"]
    return {**config, **(LING3_MID if model == "ling3" else {}), "dtype": "bfloat16"}


def write_configs(model: str, folder: Path, block_size: int) -> tuple[str, str]:
    """The folders of a random target and its draft, which hold a config.json each."""
    target = target_config(model)
    ling = model.startswith("ling3")
    draft = DraftConfig.for_target(
        target,
        num_layers=5,
        block_size=block_size,
        mask_token_id=int(target["vocab_size"]) - 1,
        markov_rank=256,
        num_context_layers=5,
        architecture="LingDSparkModel" if ling else "Qwen3DSparkModel",
        capture_last_layer=ling,
    )
    for name, config in (("target", target), ("draft", draft.to_hf())):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return str(folder / "target"), str(folder / "draft")


def base_options(given: argparse.Namespace) -> MeasureOptions:
    """SGLang's default for a target and its draft: static verification, nothing folded."""
    arguments = dict(given.args)
    target, draft = given.target, given.draft
    if given.model == "smollm2":
        prompts = given.prompts or str(ROOT / "recipes" / "smollm2_prompts.jsonl")
    else:
        target, draft = write_configs(given.model, Path(given.work) / "models", given.block_size)
        arguments = {"load_format": "dummy", "speculative_draft_load_format": "dummy", **arguments}
        prompts = ""
    return MeasureOptions(
        profile="dspark_static",
        target=target,
        draft=draft,
        fold="none",
        kernels="none",
        args=arguments,
        prompts=prompts,
        number=given.number,
        output_tokens=given.tokens,
        folder=given.work,
    )


def contexts_of(options: MeasureOptions) -> dict[str, MeasureOptions]:
    """The workloads by the ending of their figures' names; the last one has none."""
    if options.prompts:
        return {"": options}
    found = {f"_{n}": replace(options, input_tokens=n) for n in CONTEXTS}
    *short, longest = found.values()
    return {**dict(zip(found, short, strict=False)), "": longest}


@dataclass(frozen=True)
class Measurement:
    """Figures that need some engines at the same time."""

    part: str
    engines: dict[str, MeasureOptions]
    take: Callable[..., Awaitable[dict[str, Any]]]
    """Given the engines' servers in their order."""
    profiles: bool = False
    """Traces an engine, which is not timed any more then: a profiler leaves traces of its own."""


async def pair(
    options: MeasureOptions,
    rounds: int,
    change: dict[str, Any],
    steps: dict[str, float],
    default: Server,
    folded: Server,
) -> dict[str, Any]:
    """Default against folded, with kernels of our own where asked for.

    Leaves both step times in `steps`, for their census.
    """
    figures: dict[str, Any] = {}
    contexts = contexts_of(options)
    judged_by = workload_of(contexts[""])
    for ending, context in contexts.items():
        work = few(workload_of(context))
        found = await in_turn((default, folded), ("default", "folded"), work, rounds)
        before, after = found.step_ms
        figures |= {
            f"default_step_ms{ending}": before,
            f"step_ms{ending}": after,
            f"step_ratio{ending}": before / after,
            f"step_spread_ms{ending}": found.spread_ms,
            f"verdict{ending}": found.verdict,
        }
    figures |= _of_run(found.runs[1][-1])
    problems = any(prompt.answer for prompt in judged_by.prompts)
    decode = TargetTokenizer(options.target).decode if problems else None
    first, second = [
        await gather(
            *(server, judged_by.prompts),
            decode_text=decode,
            stop_token_ids=judged_by.stop_token_ids,
            answer_tokens=GREEDY_TOKENS,
        )
        for server in (default, folded)
    ]
    figures |= {"default_accept_length": first.accept_length, "accept_length": second.accept_length}
    # Kernels of our own round otherwise than SGLang's.
    judged = judge(first, second, declared_rounding=change["kernels"] != "none")
    gates = gates_to_dict([gate for gate in judged if decode or gate.name != "score"])
    figures["gates_passed"] = gates["passed"]
    figures["gates"] = gates["gates"]
    steps |= {"default_": figures["default_step_ms"], "": figures["step_ms"]}
    return figures


async def census_of(
    options: MeasureOptions, steps: dict[str, float], prefix: str, server: Server
) -> dict[str, Any]:
    """Where the step of one side of the pair, which has been timed, goes."""
    work = few(workload_of(contexts_of(options)[""]))
    traces = await traced(server, work, Path(options.folder) / f"traces_{prefix}pair")
    census, facts = summarize_traces(traces)
    return {
        f"{prefix}idle_fraction": census.calibrated_idle_fraction(steps[prefix]),
        f"{prefix}profiled_step_ms": census.step_ms,
        f"{prefix}milliseconds": census.milliseconds,
        f"{prefix}eager_kernels_per_step": facts.eager_kernels,
        f"{prefix}graphs_per_step": facts.graphs + facts.small_graphs,
        f"{prefix}synchronizations_per_step": facts.synchronizations,
    }


def few(work: Workload) -> Workload:
    """With as many prompts as are timed; gates take all."""
    return replace(work, prompts=list(work.prompts)[:TIMED_PROMPTS])


async def in_turn(
    servers: tuple[Server, Server], names: tuple[str, str], work: Workload, rounds: int
) -> Comparison:
    """Two servers compared once they are warm. Raises ValueError where no step was timed."""
    for server in servers:
        await warm_up(server, work)
    found = await compare(servers, names, work, rounds=rounds, warm_up=0)
    if not all(found.step_ms):
        raise ValueError("no answer went on behind its first token, so no step was timed")
    return found


def changed(options: MeasureOptions, change: dict[str, Any]) -> MeasureOptions:
    """The options with a change; its arguments and variables are added to theirs."""
    added: dict[str, Any] = {
        n: {**getattr(options, n), **change[n]} for n in ("args", "env") if n in change
    }
    return replace(options, **{**change, **added})


def _of_run(run: Run) -> dict[str, Any]:
    return {
        "mean_ttft_ms": run.report.timings["mean_ttft_ms"],
        "tpot_ms": run.report.timings["mean_tpot_ms"],
        "median_tpot_ms": run.report.timings["median_tpot_ms"],
    }


async def alone(options: MeasureOptions, prefix: str, server: Server) -> dict[str, Any]:
    """One engine that nothing is compared with."""
    figures: dict[str, Any] = {}
    for ending, context in contexts_of(options).items():
        run = await run_warm(server, few(workload_of(context)))
        figures |= {
            f"{prefix}_tpot_ms{ending}": run.report.timings["mean_tpot_ms"],
            f"{prefix}_step_ms{ending}": run.step_ms,
            f"{prefix}_accept_length{ending}": run.report.accept_length,
        }
    return figures


async def single(
    options: MeasureOptions, rounds: int, name: str, default: Server, server: Server
) -> dict[str, Any]:
    """The default against one switch, with its longest context."""
    work = few(workload_of(contexts_of(options)[""]))
    found = await in_turn((default, server), ("default", name), work, rounds)
    first, second = found.step_ms
    print(f"{name}: {found.verdict}", file=sys.stderr, flush=True)
    return {
        f"each_{name}_ratio": first / second,
        f"each_{name}_spread_ms": found.spread_ms,
        f"each_{name}_verdict": found.verdict,
    }


def measurements(given: argparse.Namespace) -> list[Measurement]:
    """What the parts consist of, in their order."""
    options = base_options(given)
    change = {"fold": given.fold, "kernels": given.kernels}
    both = {"default": options, "changed": changed(options, change)}
    steps: dict[str, float] = {}
    of_part: dict[str, list[Measurement]] = {
        "pair": [
            Measurement("pair", both, partial(pair, options, given.rounds, change, steps)),
            *(
                Measurement(
                    *("pair", {name: both[name]}, partial(census_of, options, steps, prefix)),
                    profiles=True,
                )
                for name, prefix in (("default", "default_"), ("changed", ""))
            ),
        ],
        "each": [
            Measurement(
                "each",
                {"default": options, name: changed(options, SINGLE[name])},
                partial(single, options, given.rounds, name),
            )
            for name in given.only
        ],
    }
    for name, other in (
        ("plain", replace(options, profile="plain", draft="")),
        ("compact", replace(options, profile="dspark_compact")),
        ("nextn", replace(options, profile="nextn", draft="")),
    ):
        of_part[name] = [Measurement(name, {name: other}, partial(alone, other, name))]
    return [found for part in given.parts for found in of_part[part]]


class Engines:
    """Engines that share the GPU and are asked in turn. Those of a group start together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turns = Turns()
        self._open: dict[str, Server | Exception] = {}
        self._stacks: dict[str, AsyncExitStack] = {}
        self._profiled: set[str] = set()

    def next_of(self, left: Sequence[Measurement]) -> Measurement:
        """Timings with what is open, then profiles of it, then what needs other engines."""
        for profiles in (False, True):
            for measurement in left:
                if measurement.profiles == profiles and set(measurement.engines) <= set(self._open):
                    return measurement
        return next((m for m in left if not m.profiles), left[0])

    async def of(self, wanted: Measurement, later: Sequence[Measurement]) -> list[Server]:
        """A measurement's servers; if one is missing, those of later ones start with it.

        Raises:
            ServerError, ValueError: one of them did not start.
        """
        first = wanted.engines
        for name in first:
            # Nothing starts for an engine that does not.
            if isinstance(failed := self._open.get(name), Exception):
                raise failed
        if not set(first) <= set(self._open):
            group = dict(first)
            for measurement in later:
                if any(isinstance(self._open.get(n), Exception) for n in measurement.engines):
                    continue
                if len({*group, *measurement.engines}) > max(self._most, len(first)):
                    break
                group |= measurement.engines
            await self.close(set(self._stacks) - (set(group) - self._profiled))
            missing = {name: group[name] for name in group if name not in self._open}
            # Whoever times kernels while it warms up has the GPU to itself.
            timing = set() if are_kept() else {n for n in missing if times_products(missing[n])}
            await asyncio.gather(*(self._start(n, missing[n]) for n in missing if n not in timing))
            for name in missing:
                if name in timing:
                    await self._start(name, missing[name])
        if wanted.profiles:
            self._profiled |= set(first)
        servers = []
        for name in first:
            found = self._open[name]
            if isinstance(found, Exception):
                raise found
            servers.append(found)
        return servers

    async def _start(self, name: str, options: MeasureOptions) -> None:
        if self._most > 2:
            # Of what the GPU has; the tokens that are needed bound what is taken.
            options = replace(options, args={"mem_fraction_static": MEMORY, **options.args})
        longest = contexts_of(options)[""]
        stack = AsyncExitStack()
        try:
            server = await open_server(
                stack, longest, workload_of(longest), name, turns=self._turns
            )
        except BaseException as error:
            await stack.aclose()
            if not isinstance(error, ServerError | ValueError | OSError):
                raise
            self._open[name] = error
        else:
            self._stacks[name], self._open[name] = stack, server

    async def close(self, names: Collection[str] | None = None) -> None:
        """End these, by default all; they start again where they are wanted."""
        ended = set(self._stacks) & set(self._stacks if names is None else names)
        await asyncio.gather(*(self._stacks.pop(name).aclose() for name in ended))
        for name in ended:
            del self._open[name]
        self._profiled -= ended


def times_products(options: MeasureOptions) -> bool:
    """Whether an engine times kernels while it warms up."""
    if options.kernels == "none":
        return False
    return bool(set(PRODUCTS) & set(parse_kernels(options.kernels)))


def are_kept() -> bool:
    """Whether engines find the choices of their kernels in a file."""
    path = os.environ.get(CHOICES)
    return bool(path) and os.path.isfile(path) and os.path.getsize(path) > 0


async def measure(given: argparse.Namespace, record: Callable[[dict[str, Any]], None]) -> bool:
    """Measure the parts; `record` is given all figures after each. Whether every one succeeded."""
    left = measurements(given)
    engines = Engines(given.beside)
    figures: dict[str, Any] = {}
    succeeded = True
    try:
        while left:
            now = engines.next_of(left)
            left.remove(now)
            try:
                figures |= await now.take(*await engines.of(now, left))
            except (ServerError, ValueError, OSError) as error:
                # The others are still worth their time; the exit code says that one failed.
                figures.setdefault(f"failed_{now.part}", str(error))
                succeeded = False
                print(f"{now.part} failed: {error}", file=sys.stderr, flush=True)
                # One may be dead, or at work on what nobody waits for any more.
                await engines.close(now.engines)
                if not now.profiles:
                    # There is no census of a step that was not timed.
                    left = [m for m in left if not (m.profiles and m.part == now.part)]
            if set(figures) - {f"failed_{name}" for name in PARTS}:
                record(figures)
    finally:
        await engines.close()
    return succeeded


def argument(text: str) -> tuple[str, Any]:
    """An argument of SGLang's, NAME=VALUE, the value as YAML reads it."""
    name, equals, value = text.partition("=")
    try:
        found = yaml.safe_load(value)
    except yaml.YAMLError:
        equals = ""
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not usable; allowed: NAME=VALUE")
    return name, found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the parts; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", choices=["smollm2", "8b", "ling3_tiny", "ling3"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["pair", "plain", "compact"])
    parser.add_argument("--only", nargs="+", choices=list(SINGLE), default=EACH)
    parser.add_argument("--target", default="", help="target folder (smollm2)")
    parser.add_argument("--draft", default="", help="exported draft (smollm2)")
    parser.add_argument("--prompts", default="", help="JSON lines with messages (smollm2)")
    parser.add_argument("--number", type=positive, default=2, help="prompts")
    parser.add_argument("--tokens", type=two_or_more, default=256, help="of an answer")
    parser.add_argument("--block-size", type=positive, default=7, help="of a random draft")
    parser.add_argument("--rounds", type=two_or_more, default=3, help="of a comparison")
    parser.add_argument(
        "--beside", type=two_or_more, default=2, help="engines on the GPU at a time"
    )
    parser.add_argument("--fold", default="all", help="what the changed side of pair folds")
    parser.add_argument("--kernels", default="none", help="and which kernels of our own it has")
    parser.add_argument("--work", default="serving_work", help="folder for logs and traces")
    parser.add_argument("--folder", type=Path, default=None, help="folder of the record")
    parser.add_argument("--add", type=record_file, nargs="*", default=[], help="records to take in")
    parser.add_argument(
        "--args", nargs="*", type=argument, default=[], help="of SGLang, NAME=VALUE"
    )
    given = parser.parse_args(argv)
    if given.model == "smollm2" and not (given.target and given.draft):
        parser.error("smollm2 takes --target and --draft; allowed: folders of a finished run")
    earlier: dict[str, Any] = {}
    for other in given.add:
        earlier |= other["figures"]

    def record(figures: dict[str, Any]) -> None:
        write_record(f"serving_{given.model}", {**earlier, **figures}, folder=given.folder)

    return 0 if asyncio.run(measure(given, record)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
