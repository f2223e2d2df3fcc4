"""Batches on their way to the device: what comes out, when slots are let go, and how far ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch

from dspark.batch import TrainingSample, batch_denominators, lay_out
from dspark.config import DraftConfig
from dspark.objective import ObjectiveConfig
from splitserve.messages import Batch, BatchItem, SlotRef
from splitserve.settings import TrainSettings
from splitserve.train.prefetch import MICRO_BATCHES_AHEAD, PAD_MULTIPLE, Prefetcher
from splitserve.train.spec import TrainerSpec
from splitserve.transport.layout import RingLayout
from splitserve.transport.ring import RingWriter
from splitserve.transport.rings import RingReaders, Rings

CONFIG = DraftConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=31,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    max_position_embeddings=64,
    block_size=3,
    target_layer_ids=(1, 2),
    num_target_layers=4,
    mask_token_id=5,
    markov_rank=4,
)
LAYOUT = RingLayout(CONFIG.num_context_features, CONFIG.hidden_size, "bfloat16")
SPANS = ((2, 5), (7, 11))


@pytest.fixture
def ring() -> Iterator[Rings]:
    owner = Rings.create(1 << 20, LAYOUT, [()])
    yield owner
    owner.close()


def spec_of(ring: Rings, row_tokens: int) -> TrainerSpec:
    return TrainerSpec(
        rank=0,
        world_size=1,
        master_port=0,
        device="cpu",
        num_threads=1,
        target_path="",
        draft=CONFIG,
        objective=ObjectiveConfig(),
        train=TrainSettings(micro_batch_size=3, num_anchors=4),
        row_tokens=row_tokens,
        warm_start=False,
        seed=9,
        eval_every=0,
        rings=ring.addresses,
        checkpoints="",
        snapshots="",
    )


class Source:
    """Samples in a ring, and what was put there."""

    def __init__(self, ring: Rings) -> None:
        self._ring, self._writer = ring, RingWriter.attach(ring.addresses[0])
        self.states: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.slots: list[SlotRef] = []

    def item(self, name: str, length: int) -> BatchItem:
        generator = torch.Generator().manual_seed(len(self.states))
        ids = torch.randint(CONFIG.vocab_size, (length,), generator=generator)
        features, states = (
            torch.randn(length, width, generator=generator).bfloat16()
            for width in (CONFIG.num_context_features, CONFIG.hidden_size)
        )
        slot = self._ring.allocate(length)
        assert slot is not None
        self._writer.write_rows(slot, 0, features, states)
        self.states[name] = features, states
        self.slots.append(slot)
        spans = tuple((a, min(b, length)) for a, b in SPANS if a < length)
        return BatchItem(name, 1, tuple(ids.tolist()), spans, slot)

    def spoil(self) -> None:
        """Give every slot to other samples, all ones."""
        for slot in self.slots:
            self._ring.free(slot)
            other = self._ring.allocate(slot.num_tokens)
            assert other is not None
            ones = [
                torch.ones(slot.num_tokens, width, dtype=torch.bfloat16)
                for width in (CONFIG.num_context_features, CONFIG.hidden_size)
            ]
            self._writer.write_rows(other, 0, *ones)


@pytest.mark.parametrize("row_tokens", [0, 40])
def test_a_micro_batch_is_what_lies_in_the_slots_when_it_is_copied(
    ring: Rings, row_tokens: int
) -> None:
    """Also once the slots are somebody else's: what is let go has been copied."""
    source = Source(ring)
    items = [source.item(f"s{i}", n) for i, n in enumerate((12, 9, 14))]
    spec = spec_of(ring, row_tokens)
    prefetch = Prefetcher(spec, RingReaders.attach(ring.addresses, "cpu"))
    plan = prefetch.add(Batch(3, ((*items,), ()), last=True))
    assert (plan.step, plan.num_micro_batches, plan.last) == (3, 2, True)
    assert prefetch.let_go() == []
    prefetch.copy_ahead()
    first = prefetch.take()
    prefetch.copy_ahead()
    assert prefetch.let_go() == [3]
    source.spoil()
    samples = []
    for item in items:
        mask = torch.zeros(len(item.token_ids), dtype=torch.bool)
        for a, b in SPANS:
            mask[a:b] = True
        samples.append(TrainingSample(item.sample_id, 1, torch.tensor(item.token_ids), mask))
    weights = torch.zeros(2, dtype=torch.float64)
    for part in (samples, []):
        layout = lay_out(
            part,
            num_anchors=4,
            block_size=3,
            seed=9,
            pad_multiple=PAD_MULTIPLE,
            row_tokens=row_tokens,
            max_documents=3,
        )
        weights += torch.stack(batch_denominators(layout, spec.objective))
        into = layout.empty_states(CONFIG.num_context_features, CONFIG.hidden_size, torch.bfloat16)
        wanted = layout.with_states([source.states[s.sample_id] for s in part], into)
        found = first if part else prefetch.take()
        for f in fields(wanted):
            assert torch.equal(getattr(found, f.name), getattr(wanted, f.name)), f.name
    assert torch.equal(plan.weights, weights) and weights[0] > 0


def test_states_are_copied_a_few_micro_batches_ahead_and_in_order(ring: Rings) -> None:
    """Slots of a step are let go with the copy of its last micro-batch, before it is used."""
    source = Source(ring)
    prefetch = Prefetcher(spec_of(ring, 16), RingReaders.attach(ring.addresses, "cpu"))
    order = []
    for step in range(2):
        parts = tuple((source.item(f"{step}/{part}", 12),) for part in range(3))
        order += [part[0].token_ids for part in parts]
        prefetch.add(Batch(step, parts))
    free: list[tuple[int, int]] = []
    for number, token_ids in enumerate(order):
        batch = prefetch.take()
        assert tuple(batch.token_ids_BS[0, :12].tolist()) == token_ids
        prefetch.copy_ahead()
        free += [(number, step) for step in prefetch.let_go()]
    ahead = MICRO_BATCHES_AHEAD
    assert free == [(2 - ahead, 0), (5 - ahead, 1)]


def test_rows_take_turns_in_two_pieces_of_memory(ring: Rings) -> None:
    """However many micro-batches a step has; a batch in use is left alone."""
    source = Source(ring)
    prefetch = Prefetcher(spec_of(ring, 16), RingReaders.attach(ring.addresses, "cpu"))
    items = [source.item(str(number), 9 + number) for number in range(5)]
    prefetch.add(Batch(0, tuple((item,) for item in items)))
    places = []
    for number, item in enumerate(items):
        batch = prefetch.take()
        prefetch.copy_ahead()
        features, states = source.states[item.sample_id]
        assert torch.equal(batch.features_BSF[0, : 9 + number], features)
        assert torch.equal(batch.target_states_BSD[0, : 9 + number], states)
        assert not batch.features_BSF[0, 9 + number :].any()
        places.append((batch.features_BSF.data_ptr(), batch.target_states_BSD.data_ptr()))
    assert len(set(places)) == 1 + MICRO_BATCHES_AHEAD
    assert places[0] == places[2] == places[4] and places[1] == places[3]
