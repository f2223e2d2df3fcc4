"""A small ring with room for four samples of eight tokens, and both its sides."""

from __future__ import annotations

import pytest
from transport_testing import LAYOUT, attach_reader, make_owner

from splitserve.transport.ring import RingOwner, RingWriter


@pytest.fixture
def owner():
    ring = make_owner(LAYOUT.slot_bytes(8) * 4)
    yield ring
    ring.close()


@pytest.fixture
def writer(owner: RingOwner):
    attached = RingWriter.attach(owner.address)
    yield attached
    attached.close()


@pytest.fixture
def reader(owner: RingOwner):
    attached = attach_reader(owner)
    yield attached
    attached.close()
