"""Text that drafts are measured with, looked for in what they are trained on.

A row leaks if it asks what an eval prompt asks: if the conversation up to one of its answers is the
prompt, or if a user's message is the prompt's last one and has MIN_WORDS words or more. It leaks as
well if its supervised text holds a stretch of a prompt: NUM_WORDS words in a row, or the whole of a
message that has fewer, but MIN_WORDS. Case and white space make no difference in texts.

Rows that come as tokens are compared by the tokens before each answer, with prompts that came as
tokens and with the others as they are rendered; by the text of their answers; and by the text
before each answer, which must not hold the whole of a prompt's last question of NUM_WORDS words or
more. A row of messages leaks if it begins, rendered, as a prompt does that came as tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from splitserve.data.conversation import (
    Conversation,
    Message,
    TokenRow,
    folded,
    plain_text,
)
from splitserve.data.length import supervised_spans
from splitserve.data.refusal import Reason, RowRefused

Decode = Callable[[Sequence[int]], str]

NUM_WORDS = 13
"""Words in a row that two texts do not share by chance."""
MIN_WORDS = 6
"""Shorter prompts, such as "Who are you?", are compared as questions only."""
_WORD = re.compile(r"\w+")


class LeakIndex:
    """What eval prompts say, ready to be compared with.

    Args:
        prompts: (id, messages) of each; held as hashes, so the index is small.
        token_prompts: (id, token ids, their text) of those that came as tokens, and of the others
            as they are rendered, without text.
    """

    def __init__(
        self,
        prompts: Iterable[tuple[str, Sequence[Message]]],
        token_prompts: Iterable[tuple[str, Sequence[int], str]] = (),
    ) -> None:
        self._questions: dict[bytes, str] = {}
        self._stretches: dict[int, dict[bytes, str]] = {}
        self._asked: dict[bytes, list[tuple[int, bytes, str]]] = {}
        """Long last questions by how they begin: number of words, digest of all, and id."""
        for name, messages in prompts:
            *_, whole = _questions(messages)
            self._questions.setdefault(whole, name)
            asked = [plain_text(m) for m in messages if m["role"] == "user"]
            words = _words(asked[-1]) if asked else []
            if len(words) >= MIN_WORDS:
                self._questions.setdefault(_digest(folded(asked[-1])), name)
            if len(words) >= NUM_WORDS:
                begin, *_ = _stretches(words[:NUM_WORDS], NUM_WORDS)
                rest = (len(words), _digest(" ".join(words)), name)
                self._asked.setdefault(begin, []).append(rest)
            for text in asked:
                self._add_text(text, name)
        self._texts: dict[int, dict[bytes, str]] = {}
        """Prompts that came as tokens, by the length of their text."""
        for name, token_ids, text in token_prompts:
            self._questions.setdefault(_token_hash(token_ids).digest(), name)
            self._add_text(text, name)
            if text:
                self._texts.setdefault(len(text), {}).setdefault(_digest(text), name)

    def _add_text(self, text: str, name: str) -> None:
        words = _words(text)
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
        for question in _questions(conversation.messages):
            self._check_question(question)
        for message in conversation.messages:
            if message["role"] == "user":
                self._check_question(_digest(folded(plain_text(message))))
            elif message["role"] == "assistant":
                self._check_answer(f"{message.get('reasoning_content', '')} {plain_text(message)}")

    def check_tokens(self, row: TokenRow, decode: Decode) -> None:
        """Refuse a row of tokens that leaks; `decode` turns token ids into text.

        Raises:
            RowRefused: eval_leak; names the eval prompt.
        """
        prompt = _token_hash(())
        asked = answered = 0
        for begin, end in supervised_spans(row.loss_mask).tolist():
            prompt.update(_bytes_of(row.token_ids[asked:begin]))
            self._check_question(prompt.copy().digest())
            if self._asked:
                self._check_asked(decode(row.token_ids[answered:begin].tolist()))
            self._check_answer(decode(row.token_ids[begin:end].tolist()))
            asked, answered = begin, end

    def check_rendered(self, token_ids: np.ndarray, decode: Decode) -> None:
        """Refuse a row of messages that begins as a prompt does that came as tokens.

        Texts are compared, for the end of a prompt and the beginning of an answer may be one token.

        Raises:
            RowRefused: eval_leak; names the eval prompt.
        """
        if not self._texts:
            return
        text = decode(token_ids.tolist())
        digest, last = hashlib.blake2b(digest_size=8), 0
        for size in sorted(self._texts):
            if size > len(text):
                return
            digest.update(text[last:size].encode())
            last = size
            if (name := self._texts[size].get(digest.copy().digest())) is not None:
                raise RowRefused(Reason.EVAL_LEAK, f"asks the same as the eval prompt {name!r}")

    def check_prompt_ids(self, token_ids: Sequence[int]) -> None:
        """Refuse a prompt whose tokens are an eval prompt's.

        Raises:
            RowRefused: eval_leak; names the eval prompt.
        """
        self._check_question(_token_hash(token_ids).digest())

    def _check_question(self, question: bytes) -> None:
        if (name := self._questions.get(question)) is not None:
            raise RowRefused(Reason.EVAL_LEAK, f"asks the same as the eval prompt {name!r}")

    def _check_asked(self, text: str) -> None:
        words = _words(text)
        for start, stretch in enumerate(_stretches(words, NUM_WORDS)):
            for size, whole, name in self._asked.get(stretch, ()):
                if _digest(" ".join(words[start : start + size])) == whole:
                    raise RowRefused(Reason.EVAL_LEAK, f"asks the same as the eval prompt {name!r}")

    def _check_answer(self, text: str) -> None:
        words = _words(text)
        for size, known in self._stretches.items():
            for stretch in _stretches(words, size):
                if stretch in known:
                    raise RowRefused(
                        Reason.EVAL_LEAK,
                        f"an answer holds {size} words in a row of the eval prompt "
                        f"{known[stretch]!r}",
                    )


def _questions(messages: Sequence[Message]) -> Iterator[bytes]:
    """Digests of the conversation up to each answer, and up to an end without one."""
    digest = hashlib.blake2b(b"conversation", digest_size=8)
    open_end = True
    for message in messages:
        if message["role"] == "assistant":
            yield digest.digest()
        open_end = message["role"] != "assistant"
        digest.update(f"{message['role']}\0{folded(plain_text(message))}\1".encode())
    if open_end:
        yield digest.digest()


def _words(text: str) -> list[str]:
    return _WORD.findall(folded(text))


def _stretches(words: Sequence[str], size: int) -> Iterator[bytes]:
    for start in range(len(words) - size + 1):
        yield _digest(" ".join(words[start : start + size]))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _token_hash(token_ids: Sequence[int]) -> hashlib.blake2b:
    digest = hashlib.blake2b(b"tokens", digest_size=8)
    digest.update(_bytes_of(token_ids))
    return digest


def _bytes_of(token_ids: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(token_ids, dtype=np.int64).tobytes()
