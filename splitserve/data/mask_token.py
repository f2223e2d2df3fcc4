"""Choosing the token that stands for "not drafted yet" in a draft block.

Its embedding is the target's and frozen, so all that matters is that the token never occurs as
text: a mask token that also occurs as a word, or as the end of a turn, would tell the draft that
something is there which is not.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_REMEDY = (
    "name an unused special token or the id of an unused vocabulary row, or leave "
    "draft.mask_token empty for a choice by rule"
)


def choose_mask_token(
    tokenizer: PreTrainedTokenizerBase,
    model_vocab_size: int,
    requested: str = "",
    used_ids: AbstractSet[int] = frozenset(),
) -> int:
    """The id of the mask token.

    By rule it is the first row of the model's vocabulary that the tokenizer does not use, where
    the model has such padded rows. Otherwise it is the tokenizer's own mask token or else the
    lowest special token that plays no other part: not bos, eos, pad or unk, not written by the
    chat template and not in the data.

    Args:
        model_vocab_size: rows of the target's embedding.
        requested: a token's text or its id in digits; empty chooses by rule.
        used_ids: ids that occur in the data.

    Raises:
        ValueError: the requested token does not exist or is in use, or the rule finds none.
    """
    taken = _parts_played(tokenizer)
    for token in used_ids:
        taken.setdefault(token, "it occurs in the data")
    special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    num_text_ids = max(tokenizer.get_vocab().values()) + 1
    if requested:
        token = _requested_id(tokenizer, requested)
        why_not = taken.get(token, "")
        if not 0 <= token < model_vocab_size:
            why_not = f"the target's vocabulary has the rows 0 ... {model_vocab_size - 1}"
        elif not why_not and token < num_text_ids and token not in special:
            why_not = "it is an ordinary token of text, not a special one"
        if why_not:
            raise ValueError(f"draft.mask_token: {requested!r} (id {token}): {why_not}; {_REMEDY}")
        return token
    padded = (i for i in range(num_text_ids, model_vocab_size) if i not in taken)
    own = [] if tokenizer.mask_token_id is None else [tokenizer.mask_token_id]
    for token in (*padded, *own, *sorted(special)):
        if token not in taken and token < model_vocab_size:
            return token
    raise ValueError(
        f"draft.mask_token: by rule none was found: the target's {model_vocab_size} vocabulary "
        f"rows are all used by the tokenizer, and each of its {len(special)} special tokens "
        "plays another part; name a special token that never occurs in your data"
    )


def _parts_played(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Why a token is not free, by id."""
    taken = {
        token: f"it is the tokenizer's {name} token"
        for name, token in (
            ("unk", tokenizer.unk_token_id),
            ("pad", tokenizer.pad_token_id),
            ("bos", tokenizer.bos_token_id),
            ("eos", tokenizer.eos_token_id),
        )
        if token is not None
    }
    if not tokenizer.chat_template:
        return taken
    template = tokenizer.get_chat_template()
    added = tokenizer.added_tokens_decoder
    written = {i for i, t in added.items() if t.content in template}
    # Some templates build their markers from the role's name, which their text does not show.
    for roles in (("user",), ("user", "assistant"), ("system", "user")):
        messages = [{"role": role, "content": "a"} for role in roles]
        try:
            ids = tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False
            )
            written |= added.keys() & set(ids)
        except TemplateError:
            # A template without a system role; its other roles are tried as well.
            continue
    for token in written:
        taken.setdefault(token, "the chat template writes it")
    return taken


def _requested_id(tokenizer: PreTrainedTokenizerBase, requested: str) -> int:
    if requested.isascii() and requested.isdigit():
        return int(requested)
    token = tokenizer.get_vocab().get(requested)
    if token is None:
        raise ValueError(
            f"draft.mask_token: {requested!r} is not a token of the target's tokenizer; {_REMEDY}"
        )
    return token
