"""The flow of samples: which responses to draw, which samples to teach, which batch is complete.

The feeder decides and counts; it sends nothing itself. The coordinator hands it what has arrived
and takes from it what is to be sent. A sample moves through

    unanswered -> generating -> answered -> teaching -> ready -> (evicted) -> answered ...

and leaves only by being dropped under a named reason. What is worked on first follows from the
schedule alone, never from the order of arrival, so a resumed run trains on the same batches.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from splitserve.data.schedule import SampleSchedule, rank_share
from splitserve.messages import (
    Batch,
    BatchItem,
    Generate,
    Generated,
    Rejected,
    Sampling,
    SlotRef,
    Taught,
    Teach,
)
from splitserve.transport.ring import RingOwner

MAX_ATTEMPTS = 3


class State(Enum):
    """Where a sample is."""

    UNANSWERED = "unanswered"
    GENERATING = "generating"
    ANSWERED = "answered"
    TEACHING = "teaching"
    READY = "ready"
    DROPPED = "dropped"


@dataclass
class Entry:
    """One sample of the run: a prompt under one sampling setting."""

    sample_id: str
    domain: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    state: State = State.UNANSWERED
    token_ids: tuple[int, ...] = ()
    """Prompt and response, once the response is known."""
    slot: SlotRef | None = None
    leases: int = 0
    """Batches out there that read the slot."""
    attempts: int = 0
    reason: str = ""


@dataclass
class FeederCounters:
    """What the feeder has seen, for the display and the report."""

    generated: int = 0
    generated_tokens: int = 0
    taught: int = 0
    taught_tokens: int = 0
    evicted: int = 0
    retried: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class Feeder:
    """Owns the samples' states and the ring's slots.

    Args:
        entries: every sample of the run, in any order.
        schedule: which samples make up which optimizer step.
        ring: the ring's owner; slots are taken and given back here only.
        num_ranks, micro_batch_size: how a batch is shared out.
        max_in_flight: requests that the engine holds at once.
        accept: turns (entry, response ids) into the ids to train on, or a reason to drop.
        first_step: the step that training goes on from.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        schedule: SampleSchedule,
        ring: RingOwner,
        *,
        num_ranks: int,
        micro_batch_size: int,
        max_in_flight: int,
        accept: Callable[[Entry, Sequence[int]], tuple[tuple[int, ...], str]],
        first_step: int = 0,
    ) -> None:
        self.entries = {entry.sample_id: entry for entry in entries}
        self.schedule = schedule
        self.ring = ring
        self.counters = FeederCounters()
        self._num_ranks = num_ranks
        self._micro_batch_size = micro_batch_size
        self._max_in_flight = max_in_flight
        self._accept = accept
        self._in_flight = 0
        self._next_step = first_step
        """The first step of which not every rank has its share yet."""
        self._served: dict[int, set[int]] = {}
        self._leased: dict[tuple[int, int], list[Entry]] = {}
        share = -(-schedule.global_batch_size // num_ranks)
        self._num_micro_batches = -(-share // micro_batch_size)
        first_use = itertools.chain.from_iterable(
            (sample_id for _, sample_id in schedule.batch(step))
            for step in range(first_step, schedule.num_steps)
        )
        order = dict.fromkeys(first_use)
        self._unanswered = deque(s for s in order if self.entries[s].state is State.UNANSWERED)

    # --- what is to be sent to the engine --------------------------------------------------------

    def requests(self) -> list[Generate | Teach]:
        """The next requests, at most as many as the engine may hold.

        Teaching comes before generating: a sample that can be trained on is worth more than one
        more answer.
        """
        found: list[Generate | Teach] = []
        while self._in_flight < self._max_in_flight:
            request = self._next_teach() or self._next_generate()
            if request is None:
                break
            self._in_flight += 1
            found.append(request)
        return found

    def _next_generate(self) -> Generate | None:
        while self._unanswered:
            entry = self.entries[self._unanswered.popleft()]
            if entry.state is State.UNANSWERED:
                entry.state = State.GENERATING
                return Generate(entry.sample_id, entry.prompt_ids, entry.sampling)
        return None

    def _next_teach(self) -> Teach | None:
        """The sample that is needed first among those that are answered but not in the ring.

        Looks ahead no further than the ring reaches: the first sample that finds no room ends
        the search, since whatever comes after it is needed later.
        """
        seen: set[str] = set()
        for step in range(self._next_step, self._horizon()):
            for _, sample_id in self.schedule.batch(step):
                entry = self.entries[sample_id]
                if sample_id in seen or entry.state is not State.ANSWERED:
                    seen.add(sample_id)
                    continue
                slot = self._room_for(len(entry.token_ids), keep=seen)
                if slot is None:
                    return None
                entry.state, entry.slot = State.TEACHING, slot
                return Teach(sample_id, entry.token_ids, slot)
        return None

    def _horizon(self) -> int:
        """One past the last step that samples are prepared for."""
        return min(self.schedule.num_steps, self._next_step + self.schedule.steps_ahead)

    def _room_for(self, num_tokens: int, keep: set[str]) -> SlotRef | None:
        """A slot, made by evicting the samples that are needed last; None when nothing may go."""
        while (slot := self.ring.allocate(num_tokens)) is None:
            idle = [
                entry
                for entry in self.entries.values()
                if entry.state is State.READY and not entry.leases and entry.sample_id not in keep
            ]
            if not idle:
                return None
            never = self.schedule.num_steps
            last = max(
                idle,
                key=lambda e: (
                    never
                    if (use := self.schedule.next_use(e.sample_id, self._next_step)) is None
                    else use
                ),
            )
            self._release(last, State.ANSWERED)
            self.counters.evicted += 1
        return slot

    def _release(self, entry: Entry, state: State) -> None:
        if entry.slot is not None:
            self.ring.free(entry.slot)
        entry.slot, entry.state = None, state

    # --- what has come back from the engine ------------------------------------------------------

    def generated(self, message: Generated) -> None:
        """Take a response; the sample is then answered or dropped under the reason given."""
        entry = self.entries[message.request_id]
        self._in_flight -= 1
        self.counters.generated += 1
        self.counters.generated_tokens += len(message.output_ids)
        self.answer(entry, message.output_ids)

    def answer(self, entry: Entry, output_ids: Sequence[int]) -> None:
        """Set a response, drawn just now or read from the run folder."""
        token_ids, reason = self._accept(entry, output_ids)
        if reason:
            self._drop(entry, reason)
        else:
            entry.state, entry.token_ids, entry.attempts = State.ANSWERED, token_ids, 0

    def taught(self, message: Taught) -> None:
        """The sample's states are complete in its slot."""
        entry = self.entries[message.sample_id]
        self._in_flight -= 1
        assert entry.slot == message.slot, f"{entry.sample_id}: taught into a slot not its own"
        entry.state, entry.attempts = State.READY, 0
        self.counters.taught += 1
        self.counters.taught_tokens += len(entry.token_ids)

    def rejected(self, message: Rejected) -> None:
        """Try again, or drop the sample once it has failed too often."""
        entry = self.entries[message.request_id]
        self._in_flight -= 1
        self._again(entry, message.reason)

    def engine_lost(self) -> None:
        """The engine has died: what it held is asked for again."""
        self._in_flight = 0
        for entry in self.entries.values():
            if entry.state in (State.GENERATING, State.TEACHING):
                self._again(entry, "engine_lost")

    def _again(self, entry: Entry, reason: str) -> None:
        entry.attempts += 1
        generating = entry.state is State.GENERATING
        self._release(entry, State.UNANSWERED if generating else State.ANSWERED)
        if entry.attempts >= MAX_ATTEMPTS:
            self._drop(entry, reason)
            return
        self.counters.retried += 1
        if generating:
            self._unanswered.appendleft(entry.sample_id)

    def _drop(self, entry: Entry, reason: str) -> None:
        entry.state, entry.reason = State.DROPPED, reason
        self.counters.dropped[reason] += 1

    # --- the trainers ----------------------------------------------------------------------------

    def batch(self, rank: int, step: int) -> Batch | None:
        """The rank's share of that step, or None while a sample of the whole batch is missing.

        A dropped sample leaves its place empty: the batch is smaller, the same at any rank count.
        """
        members = [(epoch, self.entries[s]) for epoch, s in self.schedule.batch(step)]
        if any(e.state not in (State.READY, State.DROPPED) for _, e in members):
            return None
        share = [
            (epoch, entry)
            for epoch, entry in rank_share(members, rank, self._num_ranks)
            if entry.state is State.READY
        ]
        items = []
        for epoch, entry in share:
            assert entry.slot is not None, f"{entry.sample_id} is ready without a slot"
            entry.leases += 1
            items.append(
                BatchItem(
                    entry.sample_id, epoch, entry.token_ids, len(entry.prompt_ids), entry.slot
                )
            )
        self._leased[rank, step] = [entry for _, entry in share]
        self._served.setdefault(step, set()).add(rank)
        while len(self._served.get(self._next_step, ())) == self._num_ranks:
            del self._served[self._next_step]
            self._next_step += 1
        return Batch(step, tuple(items), self._num_micro_batches)

    def step_done(self, rank: int, step: int) -> None:
        """The rank has let go of the slots of that step."""
        for entry in self._leased.pop((rank, step)):
            entry.leases -= 1

    # --- what is left ----------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests that the engine holds."""
        return self._in_flight

    def engine_is_needed(self) -> bool:
        """Whether any sample that is still to be trained on has to come from the engine.

        False once every one is in the ring and stays there: then nothing can be evicted, since
        nothing new needs room.
        """
        remaining = {
            s
            for step in range(self._next_step, self._horizon())
            for _, s in self.schedule.batch(step)
        }
        return any(self.entries[s].state not in (State.READY, State.DROPPED) for s in remaining)

    def count(self, *states: State) -> int:
        """How many samples are in one of those states."""
        return sum(entry.state in states for entry in self.entries.values())
