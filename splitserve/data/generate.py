"""Answers of the target to prompts, each under every sampling setting, once and for all.

A part of the work is one file, `part-00000-of-00004.jsonl`, of pre-tokenized rows: exactly the ids
that the target was given and wrote. Which part a prompt belongs to follows from its id, so several
processes can work on parts of their own and never meet. What is in the file already is not asked
again; a line that a crash has cut off is removed. Answers that cannot be trained on are kept
beside it, in `part-00000-of-00004.drops`, with their reason.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from dspark.anchors import counter_rng
from splitserve.data.conversation import Conversation, parse_row
from splitserve.data.refusal import RowRefused
from splitserve.data.render import ChatRenderer
from splitserve.data.samples import in_share, make_sample, sample_id_of
from splitserve.data.sources import RawRow, parse_json
from splitserve.errors import RunFailed, UserError
from splitserve.messages import EngineReady, Fatal, Generate, Generated, Rejected, Sampling, Stop
from splitserve.settings import SamplingSettings

DESCRIPTION = "answers.settings"
"""Its name has no ending of a source: the folder is read as one."""
FORMAT = 1
MAX_ATTEMPTS = 3
_POLL_SECONDS = 0.02
_SYNC_SECONDS = 5.0


class EngineProcess(Protocol):
    """What is needed of the process that runs the target, as `ChildProcess` has it."""

    def send(self, message: Any) -> None:
        """Hand over a message; never blocks."""

    def receive(self) -> list[Any]:
        """What has come back."""

    def exit_code(self) -> int | None:
        """None while it runs."""

    def silent_seconds(self) -> float:
        """Since its last sign of life."""

    def log_tail(self) -> str:
        """The end of its log."""


@dataclass(frozen=True)
class Part:
    """Which of how many parts this process works on."""

    number: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.number < self.count:
            raise UserError(
                "part", f"{self.number}/{self.count}", "K/N with 0 <= K < N", "such as part=0/4"
            )

    @property
    def name(self) -> str:
        """Of its file, without the ending."""
        return f"part-{self.number:05d}-of-{self.count:05d}"

    def has(self, prompt_id: str) -> bool:
        """Whether the prompt belongs to this part."""
        return _digest(prompt_id) % self.count == self.number


@dataclass
class GenerateCounts:
    """What has become of the answers of this process."""

    found: int = 0
    """In the file already."""
    written: int = 0
    tokens: int = 0
    """Written by the target."""
    finished: Counter[str] = field(default_factory=Counter)
    """By finish reason."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Prompts and answers that cannot be trained on, by reason."""
    failed: int = 0
    """Given up after several attempts; the next start tries them again."""


class PartFile:
    """The answers of one part: read what is there, append what comes.

    Raises:
        UserError: another process works on this part, or the folder holds other answers.
    """

    def __init__(self, folder: Path, part: Part, description: Mapping[str, Any]) -> None:
        self._done: set[int] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _claim(folder, {"format": FORMAT, **description, "parts": part.count})
            self._files = {
                kind: open(folder / f"{part.name}.{kind}", "ab+")  # noqa: SIM115 - until close
                for kind in ("jsonl", "drops")
            }
        except OSError as error:
            raise UserError(
                "out", str(folder), "a folder that can be written", f"{error.strerror}"
            ) from error
        for file in self._files.values():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(
                    "part",
                    f"{part.number}/{part.count}",
                    "a part that no other process works on",
                    "wait for it, or choose another part",
                ) from error
            for name in _whole_lines(file):
                self._done.add(_digest(name))
        self._synced = time.monotonic()

    def __len__(self) -> int:
        return len(self._done)

    def is_done(self, sample_id: str) -> bool:
        """Whether the sample is written, or has been given out by `claim`."""
        return _digest(sample_id) in self._done

    def claim(self, sample_id: str) -> None:
        """Note that the sample is being worked on, so that a second row of its name is not."""
        self._done.add(_digest(sample_id))

    def write(self, row: Mapping[str, Any], *, dropped: bool = False) -> None:
        """Append one answer; on disk a few seconds later at most."""
        file = self._files["drops" if dropped else "jsonl"]
        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Have everything on disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Have everything on disk and let go of the part."""
        self.sync()
        for file in self._files.values():
            file.close()


def generate(
    rows: Iterator[tuple[RawRow, str]],
    renderer: ChatRenderer,
    settings: Sequence[SamplingSettings],
    engine: EngineProcess,
    out: PartFile,
    part: Part,
    *,
    max_tokens: int,
    end_of_turn_ids: Sequence[int],
    seed: int,
    max_in_flight: int,
    start_timeout_seconds: float,
    heartbeat_timeout_seconds: float,
    progress: Callable[[GenerateCounts], None] = lambda counts: None,
) -> GenerateCounts:
    """Have every prompt of a part answered once under each setting.

    Args:
        rows: prompts, with default domains; a conversation's last answer is left out.
        settings: how answers are drawn; each answer gets a seed of its own.
        max_tokens: prompt and answer together.
        max_in_flight: requests that the engine holds at once.
        progress: called now and then.

    Raises:
        RunFailed: the engine has ended, cannot go on or is silent for too long.
    """
    counts = GenerateCounts(found=len(out))
    asked = _Requests(rows, renderer, settings, out, part, max_tokens, seed, counts)
    waiting: dict[str, _Request] = {}
    ready, began = False, time.monotonic()
    requests = iter(asked)
    exhausted = False
    while not exhausted or waiting:
        if ready:
            while not exhausted and len(waiting) < max_in_flight:
                request = next(requests, None)
                if request is None:
                    exhausted = True
                    break
                waiting[request.sample_id] = request
                engine.send(request.message())
        for message in engine.receive():
            if isinstance(message, Fatal):
                raise RunFailed(f"the target cannot go on: {message.message}")
            if isinstance(message, EngineReady):
                ready = True
            elif isinstance(message, Generated):
                request = waiting.pop(message.request_id)
                _keep(request, message, renderer, out, max_tokens, end_of_turn_ids, counts)
                progress(counts)
            elif isinstance(message, Rejected):
                request = waiting[message.request_id]
                request.attempts += 1
                if request.attempts < MAX_ATTEMPTS:
                    engine.send(request.message())
                else:
                    del waiting[message.request_id]
                    counts.failed += 1
        _check_alive(engine, heartbeat_timeout_seconds)
        if not ready and time.monotonic() - began > start_timeout_seconds:
            raise RunFailed(
                f"the target has not started within {start_timeout_seconds:g} seconds; "
                f"its last lines: {engine.log_tail()}"
            )
        time.sleep(_POLL_SECONDS)
    engine.send(Stop())
    out.sync()
    return counts


def _check_alive(engine: EngineProcess, heartbeat_timeout_seconds: float) -> None:
    code = engine.exit_code()
    if code is not None and not (left := engine.receive()):
        raise RunFailed(
            f"the target's process has ended with code {code}; start again to go on; "
            f"its last lines: {engine.log_tail()}"
        )
    elif code is not None:
        fatal = next((m.message for m in left if isinstance(m, Fatal)), f"code {code}")
        raise RunFailed(f"the target cannot go on: {fatal}")
    if engine.silent_seconds() > heartbeat_timeout_seconds:
        raise RunFailed(
            f"the target has given no sign of life for {heartbeat_timeout_seconds:g} seconds; "
            "start again to go on"
        )


@dataclass
class _Request:
    sample_id: str
    prompt_id: str
    domain: str
    prompt_ids: tuple[int, ...]
    setting: int
    sampling: Sampling
    attempts: int = 0

    def message(self) -> Generate:
        return Generate(self.sample_id, self.prompt_ids, self.sampling)


class _Requests:
    """The requests of a part that are not answered yet, made as they are asked for."""

    def __init__(
        self,
        rows: Iterator[tuple[RawRow, str]],
        renderer: ChatRenderer,
        settings: Sequence[SamplingSettings],
        out: PartFile,
        part: Part,
        max_tokens: int,
        seed: int,
        counts: GenerateCounts,
    ) -> None:
        self._rows, self._renderer, self._settings = rows, renderer, settings
        self._out, self._part, self._counts = out, part, counts
        self._max_tokens, self._seed = max_tokens, seed

    def __iter__(self) -> Iterator[_Request]:
        for raw, domain in self._rows:
            prompt_id = raw.place
            try:
                row = parse_row(parse_json(raw), raw.place, domain)
                prompt_id = row.id
                if not self._part.has(prompt_id):
                    continue
                todo = [k for k in range(len(self._settings)) if not self._done(prompt_id, k)]
                prompt = self._prompt(row) if todo else ()
            except RowRefused as refused:
                if self._part.has(prompt_id):
                    self._drop(prompt_id, refused.reason.value, refused.detail)
                continue
            except UserError as error:
                self._drop(prompt_id, "not_a_prompt", str(error))
                continue
            room = self._max_tokens - len(prompt)
            if todo and room < 2:
                self._drop(prompt_id, "prompt_too_long", f"{len(prompt)} tokens")
                continue
            for k in todo:
                if not in_share(prompt_id, k, self._settings[k].share, self._seed):
                    continue
                yield self._request(prompt_id, row.domain, prompt, k, room)

    def _prompt(self, row: Any) -> tuple[int, ...]:
        if not isinstance(row, Conversation):
            raise UserError("data", row.id, "rows of messages or prompts", "leave token rows out")
        messages = list(row.messages)
        if len(messages) > 1 and messages[-1]["role"] == "assistant":
            # It is the target's own answer that is wanted.
            messages.pop()
        return self._renderer.prompt_ids(messages, row.tools)

    def _request(
        self, prompt_id: str, domain: str, prompt: tuple[int, ...], k: int, room: int
    ) -> _Request:
        setting = self._settings[k]
        sample_id = sample_id_of(prompt_id, k)
        self._out.claim(sample_id)
        drawn = int(counter_rng("answer", self._seed, prompt_id, k).integers(2**31))
        sampling = Sampling(
            setting.temperature,
            setting.top_p,
            setting.top_k,
            min(setting.max_new_tokens, room),
            drawn,
        )
        return _Request(sample_id, prompt_id, domain, prompt, k, sampling)

    def _done(self, prompt_id: str, k: int) -> bool:
        return self._out.is_done(sample_id_of(prompt_id, k))

    def _drop(self, prompt_id: str, reason: str, detail: str) -> None:
        """Count and keep the drop of a prompt, once for all of its settings."""
        name = f"{prompt_id}/prompt"
        if not self._out.is_done(name):
            self._out.claim(name)
            self._counts.dropped[reason] += 1
            self._out.write({"id": name, "reason": reason, "detail": detail}, dropped=True)


def _keep(
    request: _Request,
    message: Generated,
    renderer: ChatRenderer,
    out: PartFile,
    max_tokens: int,
    end_of_turn_ids: Sequence[int],
    counts: GenerateCounts,
) -> None:
    counts.finished[message.finish_reason] += 1
    counts.tokens += len(message.output_ids)
    about = {
        "id": request.sample_id,
        "prompt_id": request.prompt_id,
        "domain": request.domain,
        "setting": request.setting,
        **asdict(request.sampling),
        "finish_reason": message.finish_reason,
    }
    try:
        sample = make_sample(
            request.sample_id,
            request.prompt_id,
            request.domain,
            request.prompt_ids,
            message.output_ids,
            max_tokens=max_tokens,
            end_of_turn_ids=end_of_turn_ids,
        )
    except RowRefused as refused:
        counts.dropped[refused.reason.value] += 1
        about |= {"reason": refused.reason.value, "output_ids": list(message.output_ids)}
        out.write(about, dropped=True)
        return
    counts.written += 1
    answer = sample.token_ids[len(request.prompt_ids) :]
    out.write(
        {
            **about,
            "text": renderer.decode(answer),
            "input_ids": list(sample.token_ids),
            "loss_mask": [int(on) for on in sample.loss_mask],
        }
    )


def _claim(folder: Path, description: Mapping[str, Any]) -> None:
    """Write down what the folder's answers are of, or compare with what is written there."""
    path = folder / DESCRIPTION
    wanted = json.loads(json.dumps(description))
    temporary = folder / f".{DESCRIPTION}.{os.getpid()}"
    temporary.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
    try:
        # Fails where there is one, in one step: of several processes one is the first.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = {}
    changed = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
    if changed:
        raise UserError(
            "out",
            str(folder),
            f"a folder of the same {', '.join(changed)}, or a new one",
            "name another folder, or give what it was begun with",
        )


def _whole_lines(file: BinaryIO) -> Iterator[str]:
    """The samples in a file; what a crash has left of a last line is cut off."""
    file.seek(0)
    end = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            name = str(json.loads(line)["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                "out", file.name, "lines of answers", f"line {number} is none; remove it"
            ) from error
        end += len(line)
        yield name
    # Writing appends, and would go on in the middle of that line.
    file.truncate(end)
    file.seek(0, os.SEEK_END)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
