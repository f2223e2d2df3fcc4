"""From settings to everything a run needs, checked before the first process starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.config import DraftConfig
from serving.ports import port_is_free
from serving.split import allowed_splits, listed, uneven
from splitserve.data.mask_token import choose_mask_token
from splitserve.data.refusal import RowRefused
from splitserve.data.samples import Sample, make_sample
from splitserve.data.schedule import SampleSchedule
from splitserve.errors import UserError
from splitserve.eval.spec import EvalPrompt, EvaluatorSpec
from splitserve.run.data import RunData, Tell, find_sources, gather
from splitserve.run.entry import Entry
from splitserve.run.gpus import Placement, place
from splitserve.run.memory import GpuNeeds, check_memory, needs, size_ring
from splitserve.settings import RunSettings
from splitserve.target.info import check_device, check_warm_start, check_window
from splitserve.target.prepare import TargetInfo, capturable_layers, prepare_target
from splitserve.target.weights import check_shared, check_weights
from splitserve.transport.layout import RingLayout


@dataclass(frozen=True)
class Plan:
    """A run before its first process: target, draft, prompts, samples and their order."""

    target: TargetInfo
    draft: DraftConfig
    data: RunData
    schedule: SampleSchedule
    ring_layout: RingLayout
    ring_bytes: int
    """Of each shard; what `layout.ring_bytes` says, or what is left of a GPU."""
    max_tokens: int
    placement: Placement
    memory: tuple[GpuNeeds, ...]
    """What each GPU will hold; empty on the CPU."""

    @property
    def held_out(self) -> tuple[EvalPrompt, ...]:
        """What drafts are measured with."""
        return self.data.held_out

    def accept(self, entry: Entry, output_ids: Sequence[int]) -> Sample | str:
        """The sample to train on for a response, or the reason to drop it."""
        try:
            sample = make_sample(
                entry.sample_id,
                entry.sample_id,
                entry.domain,
                entry.prompt_ids,
                output_ids,
                max_tokens=self.max_tokens,
                end_of_turn_ids=self.target.eos_token_ids,
            )
        except RowRefused as refused:
            return refused.reason.value
        if self.draft.mask_token_id in sample.token_ids:
            return "mask_token_in_answer"
        return sample


def load_tokenizer(path: str) -> Any:
    """The target's own tokenizer, from its folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def target_of(settings: RunSettings) -> TargetInfo:
    """Find or make the target that the settings name."""
    target = settings.target
    return prepare_target(
        path=target.path,
        random_config=target.random_config,
        random_seed=target.random_seed,
        package=target.package,
        gguf_member=target.gguf_member,
        gguf_sha256=target.gguf_sha256,
    )


def make_plan(
    settings: RunSettings, *, check_fit: bool = True, tell: Tell = lambda line: None
) -> Plan:
    """Everything that can be known, and refused, without starting a process.

    Args:
        check_fit: refuse what will not fit into the GPUs' memory.
        tell: given a line of progress now and then, while conversations are prepared.

    Raises:
        ValueError: target, layers, mask token, prompts, GPUs, ring or ports do not fit; the
            message names the setting.
    """
    check_ports(settings)
    placement = place(settings.layout)
    sources = find_sources(settings)
    target = target_of(settings)
    check_weights(target)
    check_shared(target)
    check_warm_start(target, settings.draft.warm_start)
    check_device(target, settings.layout.device)
    check_split(settings, placement.tp_size, target.config, target.architecture)
    check_lengths(settings, target)
    tokenizer = load_tokenizer(target.path)
    data = gather(settings, sources, target, tokenizer, tell)
    check_measured_lengths(settings, target, data.held_out)
    mask_token = choose_mask_token(
        tokenizer,
        target.vocab_size,
        settings.draft.mask_token,
        data.used_ids | set(target.eos_token_ids),
    )
    draft = draft_config(settings, target, mask_token)
    check_split(settings, placement.tp_size, draft.to_hf(), "the draft")
    layout = RingLayout(
        draft.num_context_features,
        draft.hidden_size,
        settings.target.dtype,
        num_shards=placement.tp_size,
    )
    schedule = SampleSchedule(
        data.names,
        settings.train.global_batch_size,
        settings.train.steps,
        settings.seed,
        settings.train.replay,
    )
    memory = needs(
        settings, placement, target.config, target.path, draft, layout.slot_bytes(1000) // 1000
    )
    check_ring(settings, layout)
    ring_bytes = settings.layout.ring_bytes or size_ring(
        memory,
        least=least_ring(settings, layout),
        most=schedule.num_samples * layout.slot_bytes(settings.data.max_tokens),
    )
    if check_fit:
        check_memory(memory)
    return Plan(
        target,
        draft,
        data,
        schedule,
        layout,
        ring_bytes,
        settings.data.max_tokens,
        placement,
        tuple(memory),
    )


def draft_config(settings: RunSettings, target: TargetInfo, mask_token_id: int) -> DraftConfig:
    """The draft's geometry on that target; refuses layers that the engine cannot capture."""
    draft = settings.draft
    names = ["num_attention_heads", "max_position_embeddings"]
    names += [] if draft.intermediate_size else ["intermediate_size"]
    for name in names:
        if not isinstance(target.config.get(name), int):
            raise UserError(
                "target.path",
                target.path,
                f"a target with an integer {name} in its config.json, which the draft takes over",
                "set draft.intermediate_size"
                if name == "intermediate_size"
                else "complete its config.json, or name another target",
            )
    capturable = capturable_layers(target.architecture, target.num_layers)
    if not capturable:
        raise UserError(
            "target.path",
            target.path,
            f"a target of 2 layers or more; SGLang captures none of the {target.num_layers} of "
            f"this {target.architecture}",
            "name a deeper target",
        )
    return DraftConfig.for_target(
        target.config,
        num_layers=draft.num_layers,
        block_size=draft.block_size,
        target_layer_ids=tuple(draft.target_layer_ids),
        num_context_layers=draft.num_context_layers,
        mask_token_id=mask_token_id,
        markov_rank=draft.markov_rank,
        markov_head_type=draft.markov_head_type,
        confidence_head_with_markov=draft.confidence_head_with_markov and draft.markov_rank > 0,
        intermediate_size=draft.intermediate_size or None,
        architecture=draft.architecture,
        capture_last_layer=capturable[-1] == target.num_layers - 1,
    )


def check_split(settings: RunSettings, tp_size: int, config: Mapping[str, Any], model: str) -> None:
    """An engine's GPUs must each get as many heads of target and draft."""
    if bad := uneven(config, tp_size):
        engines = settings.layout.engines
        raise UserError(
            "layout.target",
            settings.layout.target,
            f"engines of {listed(allowed_splits(config))} GPUs each, by which {' and '.join(bad)} "
            f"of {model} can be divided; layout.engines={engines} makes them {tp_size} each",
            "change layout.target or layout.engines",
        )


def check_lengths(settings: RunSettings, target: TargetInfo) -> None:
    """Samples must be no longer than what the target was made for."""
    longest = settings.data.max_tokens
    check_window(target, "data.max_tokens", longest, longest, "lower data.max_tokens")


def check_measured_lengths(
    settings: RunSettings, target: TargetInfo, held_out: Sequence[EvalPrompt]
) -> None:
    """Nor may a measured answer, its prompt included, be longer."""
    new = settings.eval.max_new_tokens
    longest = max(len(prompt.token_ids) for prompt in held_out) + new
    check_window(target, "eval.max_new_tokens", new, longest, "lower eval.max_new_tokens")


def least_ring(settings: RunSettings, layout: RingLayout) -> int:
    """Bytes of two whole batches: with less the run could wait for itself."""
    return 2 * settings.train.global_batch_size * layout.slot_bytes(settings.data.max_tokens)


def check_ring(settings: RunSettings, layout: RingLayout) -> None:
    """A ring with a size of its own must hold what it has to, and the host's must fit there.

    On GPUs `check_memory` counts the ring with the rest.
    """
    given, needed = settings.layout.ring_bytes, least_ring(settings, layout)
    if given and given < needed:
        raise UserError(
            "layout.ring_bytes",
            given,
            f"{needed} or more, two batches of data.max_tokens={settings.data.max_tokens}",
            "raise layout.ring_bytes, or lower data.max_tokens or train.global_batch_size",
        )
    if settings.layout.on_gpu:
        return
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // settings.layout.engines
    if given > most:
        raise UserError(
            "layout.ring_bytes",
            given,
            f"{most} or less, this machine's memory by layout.engines={settings.layout.engines}",
            "lower layout.ring_bytes",
        )


def check_ports(settings: RunSettings) -> None:
    """Refuse a port that somebody else listens on."""
    ports = {"layout.master_port": settings.layout.master_port, "engine.port": settings.engine.port}
    for name, port in ports.items():
        if port and not port_is_free(port):
            raise UserError(name, port, "a free port", f"choose another, or {name}=0 to find one")


def evaluator_spec(settings: RunSettings, plan: Plan) -> EvaluatorSpec:
    """What the evaluator measures, and how."""
    measure = settings.eval
    return EvaluatorSpec(
        target_path=plan.target.path,
        dtype=settings.target.dtype,
        prompts=plan.held_out,
        eos_token_ids=plan.target.eos_token_ids,
        max_new_tokens=measure.max_new_tokens,
        batch_size=measure.batch_size,
        temperatures=(measure.temperature,),
        final_temperatures=(measure.temperature, *measure.final_temperatures),
        seed=settings.seed,
        num_threads=settings.layout.eval_threads,
        device=settings.layout.device,
    )


def longest_request(settings: RunSettings, plan: Plan) -> int:
    """Tokens of the longest sample or measured answer, its prompt included."""
    if not settings.speculates:
        return plan.max_tokens
    measured = max(len(prompt.token_ids) for prompt in plan.held_out) + settings.eval.max_new_tokens
    return max(plan.max_tokens, measured + settings.draft.block_size)
