"""Text to token ids with true places of the tokens, long texts on several cores."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

LONG_TEXT = 16_384
"""Characters from which on a single text is cut for the tokenizer's threads."""
_LOCAL_STEPS = {"ByteLevel", "Digits", "Split", "Punctuation", "Whitespace", "WhitespaceSplit"}
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Replace"}


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a text: ids int64 [S], and starts and stops in characters, int64 [S]."""

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class Encoder:
    """A tokenizer's ids, without special tokens of its own, and the places that they stand for.

    Args:
        tokenizer: a fast Hugging Face tokenizer.

    Raises:
        ValueError: the tokenizer is not a fast one, or does more than its tokenizer.json says.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        name = tokenizer.name_or_path
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"target: the tokenizer {name!r} does not tell where its tokens stand in the text; "
                "allowed is a target with a tokenizer.json: convert it"
            )
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        # It adds no token here, but may trim white space off the places.
        self._backend.post_processor = None
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = bool(
            getattr(tokenizer, "split_special_tokens", False)
        )
        added = list(tokenizer.added_tokens_decoder.values())
        probe = (
            f" A b\n\n\n c\u00e9 e\u0301 \u4e2d 12{''.join(t.content for t in added[:4])}\r\n x "
        )
        if self.ids(probe) != tokenizer(probe, add_special_tokens=False)["input_ids"]:
            raise ValueError(
                f"target: the tokenizer {name!r} changes text outside of its tokenizer.json, so "
                "that the places of its tokens are unknown; use a target without that"
            )
        cuts = [
            t.content
            for t in added
            if t.special and not (t.lstrip or t.rstrip or t.single_word or t.normalized)
        ]
        cuttable = cuts and _is_local(self._backend) and not self._backend.encode_special_tokens
        longest_first = sorted(cuts, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, longest_first))) if cuttable else None

    def ids(self, text: str) -> list[int]:
        """The token ids of a text."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokens of each text; the tokenizer's threads share the texts of one call."""
        pieces: list[str] = []
        owners: list[list[int]] = []
        for text in texts:
            cut = self._pieces(text)
            owners.append([*range(len(pieces), len(pieces) + len(cut))])
            pieces += cut
        encodings = self._backend.encode_batch(pieces, add_special_tokens=False) if pieces else []
        return [_joined([pieces[k] for k in own], [encodings[k] for k in own]) for own in owners]

    def _pieces(self, text: str) -> list[str]:
        """A long text cut before special tokens, which no merge crosses."""
        if self._cut is None or len(text) < LONG_TEXT:
            return [text]
        places = [0, *(m.start() for m in self._cut.finditer(text)), len(text)]
        return [text[a:b] for a, b in itertools.pairwise(places) if a < b]


def _joined(pieces: Sequence[str], encodings: Sequence[Any]) -> Encoded:
    ids, places, shift = [], [], 0
    for piece, encoding in zip(pieces, encodings, strict=True):
        ids.append(np.array(encoding.ids, dtype=np.int64))
        places.append(np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + shift)
        shift += len(piece)
    joined = np.concatenate(places) if len(places) > 1 else places[0]
    return Encoded(np.concatenate(ids) if len(ids) > 1 else ids[0], joined[:, 0], joined[:, 1])


def _is_local(backend: Any) -> bool:
    """Whether text before a special token has no say in how the text after it is cut."""
    whole = json.loads(backend.to_str())
    steps = _flat(whole["pre_tokenizer"], "pretokenizers")
    normalizers = _flat(whole["normalizer"], "normalizers")
    return (
        bool(steps)
        and all(s["type"] in _LOCAL_STEPS and not s.get("add_prefix_space") for s in steps)
        and all(n["type"] in _LOCAL_NORMALIZERS for n in normalizers)
    )


def _flat(part: Any, key: str) -> list[Any]:
    if part is None:
        return []
    return [s for p in part[key] for s in _flat(p, key)] if part["type"] == "Sequence" else [part]
