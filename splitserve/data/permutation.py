"""A shuffle that is computed and not stored."""

from __future__ import annotations

import hashlib

_ROUNDS = 6
_WORD = 2**64 - 1


class Permutation:
    """A fixed shuffle of 0 ... size-1: both directions in a bounded time and without memory.

    A Feistel network shuffles the numbers of as many bits as `size` needs, half of the bits by the
    other half in turns. What falls outside of `size` is sent through again until it does not.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), section 3.

    Args:
        size: how many numbers, 1 or more.
        key: of two keys each gives a shuffle of its own, the same on every machine.
    """

    def __init__(self, size: int, key: str) -> None:
        assert size > 0, f"there is no shuffle of {size} numbers"
        self._size = size
        bits = (size - 1).bit_length()
        self._low_bits = bits - bits // 2
        self._masks = ((1 << bits // 2) - 1, (1 << self._low_bits) - 1)
        """Of the high and of the low half."""
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = tuple(
            int.from_bytes(digest[i : i + 8], "little") for i in range(0, 8 * _ROUNDS, 8)
        )

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> int:
        """The number at a place."""
        return self._walk(place, range(_ROUNDS))

    def place_of(self, number: int) -> int:
        """The place of a number."""
        return self._walk(number, range(_ROUNDS - 1, -1, -1))

    def _walk(self, value: int, rounds: range) -> int:
        if not 0 <= value < self._size:
            raise IndexError(f"{value} is not in 0 ... {self._size - 1}")
        value = self._through(value, rounds)
        while value >= self._size:
            value = self._through(value, rounds)
        return value

    def _through(self, value: int, rounds: range) -> int:
        high, low = value >> self._low_bits, value & self._masks[1]
        for number in rounds:
            if number % 2:
                low ^= _mixed(high ^ self._keys[number]) & self._masks[1]
            else:
                high ^= _mixed(low ^ self._keys[number]) & self._masks[0]
        return high << self._low_bits | low


def _mixed(word: int) -> int:
    """Every bit of a 64-bit word from all of its bits.

    Source: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, variant 13).
    """
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
