"""The flow of samples: which responses to draw, which samples to teach, which batch is complete.

The feeder decides and counts; it sends nothing itself. The coordinator hands it what has arrived
and takes from it what is to be sent. A sample moves through

    unanswered -> generating -> answered -> teaching -> ready -> (evicted) -> answered ...

and leaves only by being dropped under a named reason. What is worked on first follows from the
schedule alone, never from the order of arrival, so a resumed run trains on the same batches.

Samples of a store come answered. Only those are in memory that the schedule uses soon or that are
in the ring; the feeder walks along the schedule as far ahead as the ring has room.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from splitserve.data.samples import Sample
from splitserve.data.schedule import SampleSchedule
from splitserve.data.stored import StoredSamples
from splitserve.messages import (
    Batch,
    BatchItem,
    Generate,
    Generated,
    Rejected,
    SlotRef,
    Taught,
    Teach,
)
from splitserve.run.entry import SETTLED, Entry, FeederCounters, State
from splitserve.run.lazy_heap import LazyHeap
from splitserve.run.micro_batches import MicroBatches, share_out
from splitserve.transport.rings import Rings

MAX_ATTEMPTS = 3


class Feeder:
    """Owns the samples' states and the ring's slots.

    No call takes longer for a run with more samples.

    Args:
        entries: the samples that are held in memory, in any order.
        stored: those of a store; None where there are none.
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
        stored: StoredSamples | None = None,
    ) -> None:
        self.entries = {entry.sample_id: entry for entry in entries}
        """Every sample but those of the store that are not worked on."""
        self._stored = stored
        num_stored = 0 if stored is None else len(stored)
        self.num_samples = len(self.entries) + num_stored
        """Samples of the run."""
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
        self._members: dict[int, tuple[tuple[int, str], ...]] = {}
        """Epoch and sample of the steps that ranks ask for."""
        self._waits_for: dict[int, str] = {}
        """A sample that was missing when such a step was last asked for."""
        self._shares: dict[int, list[MicroBatches]] = {}
        """Of the steps that some ranks have and others do not."""
        self._leased: dict[tuple[int, int], list[Entry]] = {}
        self._uses = {s: schedule.next_place(s, first_step) for s in self.entries}
        """The next step that trains on a sample and its place there; None where no step does."""
        self._ahead = (first_step, 0)
        """Step and place of the first use whose sample may not be among the entries."""
        self._ahead_batch: tuple[tuple[int, str], ...] = ()
        self._by_state = Counter(entry.state for entry in self.entries.values())
        self._by_state[State.ANSWERED] += num_stored
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
        self._look_ahead()
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
            evicted = self.entries[last[1]]
            self._release(evicted, State.ANSWERED)
            self._forget(evicted)
            self.counters.evicted += 1
        return slot

    def _release(self, entry: Entry, state: State) -> None:
        if entry.slot is not None:
            self.ring.free(entry.slot)
            entry.slot = None
        self._move(entry, state)

    # --- samples of the store --------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Read samples along the schedule until the one that is needed first is among them."""
        self._ahead = max(self._ahead, (self._next_step, 0))
        while self._more_ahead():
            found = self._teachable.first()
            if found is not None and found[0] < self._ahead:
                return
            step, place = self._ahead
            if place == 0 or not self._ahead_batch:
                self._ahead_batch = self.schedule.batch(step)
            self._entry(self._ahead_batch[place][1])
            last = place + 1 == len(self._ahead_batch)
            self._ahead = (step + 1, 0) if last else (step, place + 1)

    def _more_ahead(self) -> bool:
        """Whether a later use may be that of a sample which is not in memory."""
        return self._ahead[0] < self.schedule.num_steps and len(self.entries) < self.num_samples

    def _entry(self, sample_id: str) -> Entry:
        """A sample's entry, read from the store if need be."""
        entry = self.entries.get(sample_id)
        if entry is None:
            assert self._stored is not None, f"{sample_id} is no sample of the run"
            entry = self.entries[sample_id] = Entry.of_stored(self._stored.sample(sample_id))
            self._uses[sample_id] = self.schedule.next_place(sample_id, self._next_step)
            self._missing += self._is_missing(entry)
            self._line_up(entry)
        return entry

    def _forget(self, entry: Entry) -> None:
        """Let go of a sample that can be read again once the walk along the schedule is there."""
        use = self._uses[entry.sample_id]
        if entry.stored and (use is None or use >= self._ahead):
            self._missing -= self._is_missing(entry)
            del self.entries[entry.sample_id], self._uses[entry.sample_id]

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
        entry = self.entries.get(sample_id)
        answered = entry is not None and entry.state is State.ANSWERED
        return self._uses[sample_id] if answered else None

    def _evict_key(self, sample_id: str) -> tuple[int, int] | None:
        entry = self.entries.get(sample_id)
        if entry is None or entry.state is not State.READY or entry.leases:
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
        """Set a prompt's response, drawn just now or read from the run folder."""
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
        if missing is not None and self._entry(missing).state not in SETTLED:
            return False
        if step not in self._members:
            self._members[step] = self.schedule.batch(step)
        for _, name in self._members[step]:
            if self._entry(name).state not in SETTLED:
                self._waits_for[step] = name
                return False
        self._share(step)
        return True

    def _share(self, step: int) -> None:
        """Cut a complete batch up and lease its slots, for every rank at once."""
        items = []
        for epoch, name in self._members[step]:
            entry = self.entries[name]
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
        for _, name in self._members.pop(step):
            entry = self._entry(name)
            self._missing -= self._is_missing(entry)
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
        return self._missing > 0 or self._more_ahead()

    def count(self, *states: State) -> int:
        """How many samples are in one of those states."""
        return sum(self._by_state[state] for state in states)
