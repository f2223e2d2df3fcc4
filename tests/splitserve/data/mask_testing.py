"""What tests of masks share: oracles, random conversations, and rendered spans as text."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from chat_templates import FAMILIES, Family, Pieces
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from splitserve.data.conversation import parse_row
from splitserve.data.render import ChatRenderer, Rendered

Row = dict[str, Any]


def user(content: Any) -> Row:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> Row:
    return {"role": "assistant", "content": content, **more}


def call(name: str, **arguments: Any) -> Row:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@functools.cache
def renderer_of(
    name: str, generation: bool = False
) -> tuple[PreTrainedTokenizerBase, ChatRenderer]:
    tokenizer = FAMILIES[name].tokenizer(generation)
    return tokenizer, ChatRenderer(tokenizer)


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE's letters for bytes, taken from the tokenizer one byte at a time."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    table = {}
    for byte in range(128):
        table[level.pre_tokenize_str(chr(byte))[0][0]] = byte
    for first, second in itertools.product(range(0xC2, 0xE0), range(0x80, 0xC0)):
        letters = level.pre_tokenize_str(bytes((first, second)).decode())[0][0]
        table |= {letters[0]: first, letters[1]: second}
    for text in (
        "\u0800",
        "\u4e2d",
        "\uac00",
        "\uff08",
        "\U0001f600",
        "\U00050000",
        "\U000f0000",
        "\U00100000",
    ):
        letters = level.pre_tokenize_str(text)[0][0]
        table |= dict(zip(letters, text.encode(), strict=True))
    for first in range(0xE0, 0xF0):
        text = bytes((first, 0xA0 if first == 0xE0 else 0x80, 0x80))
        if first != 0xED:
            letters = level.pre_tokenize_str(text.decode())[0][0]
            table |= dict(zip(letters, text, strict=True))
    return table


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    added = tokenizer.added_tokens_decoder
    if token in added:
        return added[token].content.encode()
    table = _bytes_of_characters()
    return bytes(table[c] for c in tokenizer.convert_ids_to_tokens(token))


def expected_mask(tokenizer: PreTrainedTokenizerBase, ids: list[int], pieces: Pieces) -> list[bool]:
    """A token is supervised if all of its bytes are, by the lengths of the tokens alone."""
    supervised = b"".join(bytes([on]) * len(text.encode()) for text, on in pieces)
    mask, place = [], 0
    for token in ids:
        size = len(token_bytes(tokenizer, token))
        mask.append(size > 0 and all(supervised[place : place + size]))
        place += size
    assert place == len(supervised), "the tokens do not cover the text"
    return mask


def check(
    tokenizer: PreTrainedTokenizerBase,
    renderer: ChatRenderer,
    messages: list[Row],
    pieces: Pieces,
    tools: list[Row] | None = None,
) -> Rendered:
    """Compare ids with the tokenizer's own, and the mask with the oracle's."""
    conversation = parse_row({"messages": messages, "tools": tools}, "a", "d")
    text = tokenizer.apply_chat_template(
        [{**m, "content": m["content"] or ""} for m in messages], tools=tools, tokenize=False
    )
    assert text == "".join(piece for piece, _ in pieces), "the oracle does not know the template"
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    rendered = renderer.render_conversation(conversation.messages, conversation.tools)
    mask = expected_mask(tokenizer, whole, pieces)
    length = max(i for i, on in enumerate(mask) if on) + 1
    assert rendered.token_ids.tolist() == whole[:length]
    assert rendered.loss_mask.tolist() == mask[:length]
    return rendered


def spans(tokenizer: PreTrainedTokenizerBase, rendered: Rendered) -> list[str]:
    """The text of each supervised run of tokens."""
    runs: list[list[int]] = []
    before = False
    for token, on in zip(rendered.token_ids.tolist(), rendered.loss_mask.tolist(), strict=True):
        if on and not before:
            runs.append([])
        if on:
            runs[-1].append(token)
        before = on
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


MARKERS = sorted({s for f in FAMILIES.values() for s in f.special})
FRAGMENTS = st.sampled_from(
    [
        *MARKERS, "<|im_start|>assistant\n", "<|head|>assistant<|/head|>\n\n", "<turn>model\n",
        "[/INST] ", "\n", "\n\n", "\r\n", " ", "  ", "two", " plus", "It is four.", "a",
        "\u00e9", "e\u0301", "\u4e2d\u6587", "\U0001f600", "\ufb01", "\u200d", "<tool_call>",
        "{{ 1 }}", "{% endfor %}", '{"a": 1}', "\u2028", "assistant", "\t", "\x00",
    ]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=5).map("".join)


@st.composite
def conversations(draw: st.DrawFn, family: Family) -> list[Row]:
    count = draw(st.integers(1, 6))
    if family.alternates:
        roles = list(itertools.islice(itertools.cycle(("user", "assistant")), count + 1))
        if draw(st.booleans()):
            roles.insert(0, "system")
    else:
        roles = [draw(st.sampled_from(family.roles[1:])) for _ in range(count)]
        if draw(st.booleans()):
            roles.insert(0, "system")
        roles.insert(draw(st.integers(1, len(roles))), "assistant")
    messages = []
    for role in roles:
        message: Row = {"role": role, "content": draw(TEXTS)}
        if role == "assistant" and family.name == "chatml_tools":
            if draw(st.booleans()):
                message["reasoning_content"] = draw(TEXTS)
            if draw(st.booleans()):
                names = draw(st.lists(st.sampled_from(["look", "add"]), min_size=1, max_size=2))
                message["tool_calls"] = [call(n, text=draw(TEXTS), number=3) for n in names]
        messages.append(message)
    return messages
