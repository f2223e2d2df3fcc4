"""The flow of samples: which responses to draw, which samples to teach, which batch is complete.

The feeder decides and counts; it sends nothing itself. The coordinator hands it what has arrived
and takes from it what is to be sent. A sample moves through

    unanswered -> generating -> answered -> teaching -> ready -> (evicted) -> answered ...

and leaves only by being dropped under a named reason. What is worked on first follows from the
schedule alone, never from the order of arrival, so a resumed run trains on the same batches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from splitserve.data.samples import Sample
from splitserve.data.schedule import SampleSchedule
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
from splitserve.run.lazy_heap import LazyHeap
from splitserve.run.micro_batches import MicroBatches, share_out
from splitserve.transport.rings import Rings

MAX_ATTEMPTS = 3


class State(Enum):
    """Where a sample is."""

    UNANSWERED = "unanswered"
    GENERATING = "generating"
    ANSWERED = "answered"
    TEACHING = "teaching"
    READY = "ready"
    DROPPED = "dropped"


SETTLED = (State.READY, State.DROPPED)
"""Nothing is to be had from the engine."""


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
    supervised: tuple[tuple[int, int], ...] = ()
    """Begin and end of every run of tokens that is learned from, once the response is known."""
    draft_step: int = -1
    """Of the draft that the response was speculated with; -1 where there was none."""
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
    aged: int = 0
    """Samples in batches whose response came from an engine with a draft."""
    age_steps: int = 0
    """Optimizer steps between that draft and the batch, summed over these samples."""

    def take_draft_age(self) -> dict[str, float]:
        """For the metrics file: the mean age since the last call, in steps; nothing without any."""
        if not self.aged:
            return {}
        mean = self.age_steps / self.aged
        self.aged = self.age_steps = 0
        return {"draft_age_steps": mean}


class Feeder:
    """Owns the samples' states and the ring's slots.

    No call takes longer for a run with more samples.

    Args:
        entries: every sample of the run, in any order.
        schedule: which samples make up which optimizer step.
        ring: the owner of every ring; slots are taken and given back here only.
        num_ranks, micro_batch_size, row_tokens: how a batch is shared out, see `share_out`.
        max_in_flight: requests that the engine holds at once.
        accept: turns (entry, response ids) into the sample to train on, or a reason to drop it.
        first_step: the step that training goes on from.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        schedule: SampleSchedule,
        ring: Rings,
        *,
        num_ranks: int,
        micro_batch_size: int,
        row_tokens: int = 0,
        max_in_flight: int,
        accept: Callable[[Entry, Sequence[int]], Sample | str],
        first_step: int = 0,
    ) -> None:
        self.entries = {entry.sample_id: entry for entry in entries}
        self.schedule = schedule
        self.ring = ring
        self.counters = FeederCounters()
        self._num_ranks = num_ranks
        self._micro_batch_size, self._row_tokens = micro_batch_size, row_tokens
        self._max_in_flight = max_in_flight
        self._accept = accept
        self._in_flight = 0
        self._next_step = first_step
        """The first step of which not every rank has its share yet."""
        self._due = [first_step] * num_ranks
        """The step that each rank gets next."""
        self._members: dict[int, list[tuple[int, Entry]]] = {}
        """Epoch and sample of the steps that ranks ask for."""
        self._waits_for: dict[int, Entry] = {}
        """A sample that was missing when such a step was last asked for."""
        self._shares: dict[int, list[MicroBatches]] = {}
        """Of the steps that some ranks have and others do not."""
        self._leased: dict[tuple[int, int], list[Entry]] = {}
        self._uses = {s: schedule.next_place(s, first_step) for s in self.entries}
        """The next step that trains on a sample and its place there; None where no step does."""
        self._by_state = Counter(entry.state for entry in self.entries.values())
        self._missing = sum(map(self._is_missing, self.entries.values()))
        self._teachable = LazyHeap(self._teach_key)
        self._evictable = LazyHeap(self._evict_key)
        waiting = [
            (use, s)
            for s, use in self._uses.items()
            if use is not None and self.entries[s].state is State.UNANSWERED
        ]
        self._unanswered = deque(sample_id for _, sample_id in sorted(waiting))

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
                self._move(entry, State.GENERATING)
                return Generate(entry.sample_id, entry.prompt_ids, entry.sampling)
        return None

    def _next_teach(self) -> Teach | None:
        """The sample that is needed first among those that are answered but not in the ring.

        Where that one finds no room there is none for those that are needed later.
        """
        found = self._teachable.first()
        if found is None:
            return None
        use, sample_id = found
        entry = self.entries[sample_id]
        slot = self._room_for(len(entry.token_ids), use)
        if slot is None:
            return None
        entry.slot = slot
        self._move(entry, State.TEACHING)
        return Teach(sample_id, entry.token_ids, slot)

    def _room_for(self, num_tokens: int, use: tuple[int, int]) -> SlotRef | None:
        """A slot, made by evicting samples that are needed last and later than `use`; or None."""
        while (slot := self.ring.allocate(num_tokens)) is None:
            last = self._evictable.first()
            if last is None or last[0] >= (-use[0], -use[1]):
                return None
            self._release(self.entries[last[1]], State.ANSWERED)
            self.counters.evicted += 1
        return slot

    def _release(self, entry: Entry, state: State) -> None:
        if entry.slot is not None:
            self.ring.free(entry.slot)
            entry.slot = None
        self._move(entry, state)

    # --- where every sample is -------------------------------------------------------------------

    def _move(self, entry: Entry, state: State) -> None:
        self._by_state[entry.state] -= 1
        self._by_state[state] += 1
        self._missing -= self._is_missing(entry)
        entry.state = state
        self._missing += self._is_missing(entry)
        self._line_up(entry)

    def _line_up(self, entry: Entry) -> None:
        self._teachable.push(entry.sample_id)
        self._evictable.push(entry.sample_id)

    def _teach_key(self, sample_id: str) -> tuple[int, int] | None:
        answered = self.entries[sample_id].state is State.ANSWERED
        return self._uses[sample_id] if answered else None

    def _evict_key(self, sample_id: str) -> tuple[int, int] | None:
        entry = self.entries[sample_id]
        if entry.state is not State.READY or entry.leases:
            return None
        step, place = self._uses[sample_id] or (self.schedule.num_steps, 0)
        return -step, -place

    def _is_missing(self, entry: Entry) -> bool:
        return entry.state not in SETTLED and self._uses[entry.sample_id] is not None

    # --- what has come back from the engine ------------------------------------------------------

    def generated(self, message: Generated) -> None:
        """Take a response; the sample is then answered or dropped under the reason given."""
        entry = self.entries[message.request_id]
        self._in_flight -= 1
        self.counters.generated += 1
        self.counters.generated_tokens += len(message.output_ids)
        entry.draft_step = message.draft_step
        self.answer(entry, message.output_ids)

    def answer(self, entry: Entry, output_ids: Sequence[int]) -> None:
        """Set a response, drawn just now or read from the run folder."""
        sample = self._accept(entry, output_ids)
        if isinstance(sample, str):
            self._drop(entry, sample)
            return
        entry.token_ids, entry.supervised = sample.token_ids, sample.supervised
        entry.attempts = 0
        self._move(entry, State.ANSWERED)

    def taught(self, message: Taught) -> None:
        """The sample's states are complete in its slot."""
        entry = self.entries[message.sample_id]
        self._in_flight -= 1
        assert entry.slot == message.slot, f"{entry.sample_id}: taught into a slot not its own"
        entry.attempts = 0
        self._move(entry, State.READY)
        self.counters.taught += 1
        self.counters.taught_tokens += len(entry.token_ids)

    def rejected(self, message: Rejected) -> None:
        """Try again, or drop the sample once it has failed too often."""
        entry = self.entries[message.request_id]
        self._in_flight -= 1
        self._again(entry, message.reason)

    def engine_lost(self, held: Iterable[str]) -> None:
        """An engine has died: what it held, by sample id, is asked for again."""
        for sample_id in held:
            self._in_flight -= 1
            self._again(self.entries[sample_id], "engine_lost")

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
        entry.reason = reason
        self._move(entry, State.DROPPED)
        self.counters.dropped[reason] += 1

    # --- the trainers ----------------------------------------------------------------------------

    def batch(self, rank: int, step: int) -> Batch | None:
        """The rank's share of that step, or None while a sample of the whole batch is missing.

        A rank gets its steps in order, also when it asks for several. A dropped sample leaves its
        place empty: the batch is smaller, the same at any rank count.
        """
        if step != self._due[rank]:
            return None
        if step not in self._shares and not self._complete(step):
            return None
        self._due[rank] = step + 1
        batch = Batch(step, self._shares[step][rank], last=step + 1 == self.schedule.num_steps)
        while min(self._due) > self._next_step:
            self._pass(self._next_step)
        return batch

    def _complete(self, step: int) -> bool:
        """Share the step's batch out if no sample of it is missing."""
        missing = self._waits_for.get(step)
        if missing is not None and missing.state not in SETTLED:
            return False
        if step not in self._members:
            batch = self.schedule.batch(step)
            self._members[step] = [(epoch, self.entries[name]) for epoch, name in batch]
        for _, entry in self._members[step]:
            if entry.state not in SETTLED:
                self._waits_for[step] = entry
                return False
        self._share(step)
        return True

    def _share(self, step: int) -> None:
        """Cut a complete batch up and lease its slots, for every rank at once."""
        items = []
        for epoch, entry in self._members[step]:
            if entry.state is State.DROPPED:
                continue
            assert entry.slot is not None, f"{entry.sample_id} is ready without a slot"
            items.append(
                BatchItem(entry.sample_id, epoch, entry.token_ids, entry.supervised, entry.slot)
            )
            if entry.draft_step >= 0:
                self.counters.aged += 1
                self.counters.age_steps += step - entry.draft_step
        shares = share_out(
            items,
            num_ranks=self._num_ranks,
            micro_batch_size=self._micro_batch_size,
            row_tokens=self._row_tokens,
        )
        self._shares[step] = shares
        for rank, micro_batches in enumerate(shares):
            leased = [self.entries[item.sample_id] for part in micro_batches for item in part]
            self._leased[rank, step] = leased
            for entry in leased:
                entry.leases += 1

    def _pass(self, step: int) -> None:
        """Every rank has its share of the step: its samples are needed later, or not anymore."""
        del self._shares[step]
        self._waits_for.pop(step, None)
        self._next_step = step + 1
        for _, entry in self._members.pop(step):
            self._missing -= self._is_missing(entry)
            name = entry.sample_id
            self._uses[name] = self.schedule.next_place(name, self._next_step)
            self._missing += self._is_missing(entry)
            self._line_up(entry)

    def step_done(self, rank: int, step: int) -> None:
        """The rank has let go of the slots of that step."""
        for entry in self._leased.pop((rank, step)):
            entry.leases -= 1
            self._line_up(entry)

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
        return self._missing > 0

    def count(self, *states: State) -> int:
        """How many samples are in one of those states."""
        return sum(self._by_state[state] for state in states)
