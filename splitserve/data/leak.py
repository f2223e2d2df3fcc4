"""Text that drafts are measured with, looked for in what they are trained on.

A row leaks if it asks the question of an eval prompt, or if its supervised text holds a stretch of
an eval prompt: NUM_WORDS words in a row, or the whole prompt where that has fewer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence

from splitserve.data.conversation import Conversation, Message, folded, plain_text, question_text
from splitserve.data.refusal import Reason, RowRefused

NUM_WORDS = 13
"""Words in a row that two texts do not share by chance."""
MIN_WORDS = 6
"""Shorter prompts, such as "Who are you?", are compared as questions only."""
_WORD = re.compile(r"\w+")


class LeakIndex:
    """What eval prompts say, ready to be compared with.

    Args:
        prompts: (id, messages) of each; held as hashes, so the index is small.
    """

    def __init__(self, prompts: Iterable[tuple[str, Sequence[Message]]]) -> None:
        self._questions: dict[bytes, str] = {}
        self._stretches: dict[int, dict[bytes, str]] = {}
        for name, messages in prompts:
            self._questions.setdefault(_digest(question_text(messages)), name)
            for message in messages:
                if message["role"] != "user":
                    continue
                words = _words(plain_text(message))
                size = min(NUM_WORDS, len(words))
                if size >= MIN_WORDS:
                    found = self._stretches.setdefault(size, {})
                    for stretch in _stretches(words, size):
                        found.setdefault(stretch, name)

    def check(self, conversation: Conversation) -> None:
        """Refuse a row that leaks.

        Raises:
            RowRefused: eval_leak; names the eval prompt.
        """
        name = self._questions.get(_digest(question_text(conversation.messages)))
        if name is not None:
            raise RowRefused(Reason.EVAL_LEAK, f"asks the same as the eval prompt {name!r}")
        for message in conversation.messages:
            if message["role"] != "assistant":
                continue
            text = f"{message.get('reasoning_content', '')} {plain_text(message)}"
            words = _words(text)
            for size, known in self._stretches.items():
                for stretch in _stretches(words, size):
                    if stretch in known:
                        raise RowRefused(
                            Reason.EVAL_LEAK,
                            f"an answer holds {size} words in a row of the eval prompt "
                            f"{known[stretch]!r}",
                        )


def _words(text: str) -> list[str]:
    return _WORD.findall(folded(text))


def _stretches(words: Sequence[str], size: int) -> Iterator[bytes]:
    for start in range(len(words) - size + 1):
        yield _digest(" ".join(words[start : start + size]))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
