"""The documents of a store as samples of a run, read when they are asked for."""

from __future__ import annotations

from splitserve.data.samples import Sample, sample_of
from splitserve.data.store import DocumentStore

_MARK = "/c"
"""Before the document's number in a sample's name; a prompt's samples end in `/` and a number."""


class StoredSamples:
    """Samples that need no answer, by the numbers of their documents, 0 to len - 1.

    A sample's name is its document's id and number, since a source may use an id twice.
    """

    def __init__(self, store: DocumentStore) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def name_of(self, place: int) -> str:
        """The name of the sample with that number."""
        return f"{self._store.name(place)}{_MARK}{place}"

    def place_of(self, name: str) -> int | None:
        """The number of the sample with that name; None where it is another's."""
        _, mark, number = name.rpartition(_MARK)
        if not (mark and number.isascii() and number.isdigit() and int(number) < len(self)):
            return None
        return int(number) if self.name_of(int(number)) == name else None

    def sample(self, name: str) -> Sample:
        """A sample with its tokens.

        Raises:
            KeyError: there is none of that name.
        """
        place = self.place_of(name)
        if place is None:
            raise KeyError(name)
        document = self._store[place]
        return sample_of(document, name, document.id)
