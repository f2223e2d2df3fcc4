"""What a run trains on and is measured with: prompts, conversations with answers, or both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.anchors import counter_rng
from splitserve.data.account import DropReport
from splitserve.data.conversation import Conversation
from splitserve.data.given import source_list
from splitserve.data.leak import LeakIndex
from splitserve.data.pipeline import PipelineSettings
from splitserve.data.prepare import Preparation, leak_index, prepare
from splitserve.data.prompts import Prompt, read_prompts
from splitserve.data.refusal import Reason, RowRefused
from splitserve.data.render import ChatRenderer
from splitserve.data.samples import Sample, in_share, sample_id_of
from splitserve.data.schedule import SampleNames
from splitserve.data.sources import SourceSettings, check_source
from splitserve.data.split import Split, check_no_leak, mixed, split_prompts
from splitserve.data.stored import StoredSamples
from splitserve.errors import UserError
from splitserve.eval.spec import EvalPrompt
from splitserve.messages import Sampling
from splitserve.run.entry import Entry
from splitserve.settings import DataSettings, RunSettings
from splitserve.target.info import TargetInfo
from splitserve.target.prepare import default_cache_dir

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Sources:
    """What was named, read as far as it can be without the target."""

    prompts: Split
    conversations: tuple[SourceSettings, ...]


@dataclass(frozen=True)
class RunData:
    """The samples of a run and the prompts that drafts are measured with."""

    entries: tuple[Entry, ...]
    """Samples that the target answers."""
    stored: StoredSamples | None
    """Samples that came with answers."""
    held_out: tuple[EvalPrompt, ...]
    used_ids: frozenset[int]
    """Token ids that occur in any of these."""
    digest: str
    """Of all samples, in hexadecimal: a resumed run must have the same."""
    accounts: dict[str, dict[str, Any]]
    """Where the rows of prompts, measured and conversations went, see `DropReport.to_dict`."""

    @property
    def names(self) -> SampleNames:
        """Of all samples; raises ValueError where there are none."""
        return SampleNames((entry.sample_id for entry in self.entries), self.stored)


def find_sources(settings: RunSettings) -> Sources:
    """Read the prompts, and see that the conversations are there: a typo is to show at once.

    Raises:
        ValueError: a source is missing or malformed, or the same text is trained on and measured.
    """
    data = settings.data
    conversations: tuple[SourceSettings, ...] = ()
    if data.conversations:
        conversations = tuple(source_list(data.conversations, "data.conversations"))
        for source in conversations:
            check_source(source.path, "data.conversations")
    prompts = read_prompts(data.prompts) if data.prompts else []
    if data.eval_prompts:
        held_out = tuple(read_prompts(data.eval_prompts, "data.eval_prompts"))
        split = Split(split_prompts(prompts, 0.0, settings.seed).train, held_out)
        check_no_leak(split.train, split.held_out)
    else:
        split = split_prompts(prompts, data.held_out_fraction, settings.seed)
    if not split.held_out and not conversations:
        raise _nothing_to_measure(data)
    return Sources(split, conversations)


def gather(
    settings: RunSettings, sources: Sources, target: TargetInfo, tokenizer: Any, tell: Tell
) -> RunData:
    """Tokens of everything; conversations are prepared here, before any process starts.

    Args:
        tell: given a line of progress now and then.

    Raises:
        ValueError: too many rows are dropped, or nothing is left to measure with.
    """
    data = settings.data
    renderer = ChatRenderer(tokenizer, data.chat_template_kwargs, data.system_prompt)
    measured = list(sources.prompts.held_out)
    stored: StoredSamples | None = None
    store_digest, used = "", frozenset[int]()
    accounts: dict[str, dict[str, Any]] = {}
    if sources.conversations:
        wanted = Preparation(
            sources.conversations,
            _pipeline_settings(data),
            data.until,
            0.0 if data.eval_prompts else data.held_out_fraction,
            settings.seed,
        )
        folder = Path(data.cache_dir) if data.cache_dir else default_cache_dir() / "data"
        prepared = prepare(wanted, tokenizer, target.eos_token_ids, measured, folder, tell)
        stored, store_digest = StoredSamples(prepared.store), prepared.store.digest
        used = prepared.store.used_ids()
        accounts["conversations"] = prepared.store.report.to_dict()
        measured = mixed([*measured, *prepared.held_out], settings.seed)
    questions, accounts["measured"] = _render(renderer, measured, data, None)
    if not questions:
        raise _nothing_to_measure(data)
    leaks = leak_index(measured, renderer)
    train, accounts["prompts"] = _render(renderer, sources.prompts.train, data, leaks)
    entries = _entries(settings, train)
    used |= {token for _, ids in (*train, *questions) for token in ids}
    held_out = [EvalPrompt(prompt.id, prompt.domain, ids) for prompt, ids in questions]
    return RunData(
        entries,
        stored,
        tuple(held_out[: settings.eval.num_prompts or None]),
        used,
        _digest(entries, store_digest),
        accounts,
    )


def _pipeline_settings(data: DataSettings) -> PipelineSettings:
    return PipelineSettings(
        max_tokens=data.max_tokens,
        chat_template_kwargs=data.chat_template_kwargs,
        system_prompt=data.system_prompt,
        last_answer_only=data.last_answer_only,
        max_drop_fraction=data.max_drop_fraction,
        max_zero_mask_fraction=data.max_zero_mask_fraction,
        num_workers=data.num_workers,
    )


def _nothing_to_measure(data: DataSettings) -> UserError:
    return UserError(
        "data.held_out_fraction",
        data.held_out_fraction,
        "a share that holds out at least one prompt",
        "raise it, give more prompts, or name a source in data.eval_prompts",
    )


def _render(
    renderer: ChatRenderer, prompts: Sequence[Prompt], data: DataSettings, leaks: LeakIndex | None
) -> tuple[list[tuple[Prompt, tuple[int, ...]]], dict[str, Any]]:
    """Prompts with their ids, and the account; those that cannot be used are left out.

    Raises:
        ValueError: too many are refused; shows the reasons with an example each.
    """
    report = DropReport()
    rendered: list[tuple[Prompt, tuple[int, ...]]] = []
    if not prompts:
        return rendered, report.to_dict()
    for prompt in prompts:
        try:
            if leaks is not None:
                leaks.check(Conversation(prompt.id, prompt.domain, prompt.messages))
            ids = prompt.token_ids or renderer.prompt_ids(prompt.messages, prompt.tools)
            if leaks is not None:
                leaks.check_prompt_ids(ids)
            if prompt.held_out and len(ids) >= data.max_tokens:
                raise RowRefused(
                    Reason.PROMPT_TOO_LONG,
                    f"a question of {len(ids)} tokens (data.max_tokens={data.max_tokens})",
                )
        except RowRefused as refused:
            report.drop(prompt.id, refused)
            continue
        report.use(Sample(prompt.id, prompt.id, prompt.domain, ids, (False,) * len(ids)))
        rendered.append((prompt, ids))
    report.check(max_drop_fraction=data.max_drop_fraction, decode=renderer.decode)
    return rendered, report.to_dict()


def _entries(
    settings: RunSettings, prompts: Sequence[tuple[Prompt, tuple[int, ...]]]
) -> tuple[Entry, ...]:
    """One sample per sampling setting and training prompt in its share.

    Prompts that leave no room for an answer are dropped by `Plan.accept` like any other sample.
    """
    return tuple(
        Entry(
            sample_id_of(prompt.id, k),
            prompt.domain,
            ids,
            Sampling(
                setting.temperature,
                setting.top_p,
                setting.top_k,
                max(2, min(setting.max_new_tokens, settings.data.max_tokens - len(ids))),
                # Of its own for every sample: the answer is the same whatever it is batched with.
                int(counter_rng("answer", settings.seed, prompt.id, k).integers(2**31)),
            ),
        )
        for prompt, ids in prompts
        for k, setting in enumerate(settings.data.sampling)
        if in_share(prompt.id, k, setting.share, settings.seed)
    )


def _digest(entries: Sequence[Entry], store_digest: str) -> str:
    digest = hashlib.blake2b(store_digest.encode(), digest_size=16)
    for entry in entries:
        digest.update(f"\0{entry.sample_id}\0{entry.prompt_ids}".encode())
    return digest.hexdigest()
