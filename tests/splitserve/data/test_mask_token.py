from __future__ import annotations

import pytest
from chat_tokenizer import CHATML, SPECIAL, TokenizerMaker
from transformers import PreTrainedTokenizerFast

from splitserve.data.mask_token import choose_mask_token

PAD, START, END, UNUSED_A, UNUSED_B = range(5)


def test_padded_rows_come_first(tokenizer: PreTrainedTokenizerFast) -> None:
    size = len(tokenizer)
    assert choose_mask_token(tokenizer, size + 8) == size
    assert choose_mask_token(tokenizer, size + 8, used_ids={size}) == size + 1


def test_otherwise_the_lowest_free_special_token(tokenizer: PreTrainedTokenizerFast) -> None:
    size = len(tokenizer)
    assert choose_mask_token(tokenizer, size) == UNUSED_A
    assert choose_mask_token(tokenizer, size, used_ids={UNUSED_A, 40}) == UNUSED_B
    with pytest.raises(ValueError, match=r"draft\.mask_token: by rule none"):
        choose_mask_token(tokenizer, size, used_ids={UNUSED_A, UNUSED_B})


def test_the_tokenizers_own_mask_token_is_preferred(make_tokenizer: TokenizerMaker) -> None:
    tokenizer = make_tokenizer(mask_token="<unused_b>")
    assert choose_mask_token(tokenizer, len(tokenizer)) == UNUSED_B


def test_tokens_that_the_template_writes_are_not_free(make_tokenizer: TokenizerMaker) -> None:
    literal = make_tokenizer(CHATML + "{% if tools %}<unused_a>{% endif %}")
    assert choose_mask_token(literal, len(literal)) == UNUSED_B
    built = make_tokenizer(CHATML + "{{ '<unused' + '_a>' }}")
    assert choose_mask_token(built, len(built)) == UNUSED_B


def test_a_template_without_system_role_is_no_obstacle(make_tokenizer: TokenizerMaker) -> None:
    raises = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = make_tokenizer(raises + CHATML)
    assert choose_mask_token(tokenizer, len(tokenizer)) == UNUSED_A


def test_a_tokenizer_without_template_has_a_mask_token_too(
    make_tokenizer: TokenizerMaker,
) -> None:
    tokenizer = make_tokenizer(None)
    assert choose_mask_token(tokenizer, len(tokenizer)) == UNUSED_A


def test_requested_by_text_or_id(tokenizer: PreTrainedTokenizerFast) -> None:
    size = len(tokenizer)
    assert choose_mask_token(tokenizer, size, "<unused_b>") == UNUSED_B
    assert choose_mask_token(tokenizer, size, str(UNUSED_B)) == UNUSED_B
    assert choose_mask_token(tokenizer, size + 8, str(size + 7)) == size + 7


@pytest.mark.parametrize(
    ("requested", "why"),
    [
        ("<|im_end|>", "eos"),
        ("<|im_start|>", "bos"),
        ("<|pad|>", "pad"),
        (str(END), "eos"),
        ("a", "ordinary token"),
        ("300", "ordinary token"),
        ("<unused_a>", "occurs in the data"),
        ("no such token", "not a token"),
        ("99999", "rows 0 "),
        ("-1", "not a token"),
    ],
)
def test_requested_tokens_in_use_are_refused(
    tokenizer: PreTrainedTokenizerFast, requested: str, why: str
) -> None:
    with pytest.raises(ValueError, match=rf"draft\.mask_token: .*{why}.*leave draft\.mask_token"):
        choose_mask_token(tokenizer, len(tokenizer), requested, {UNUSED_A})


def test_a_requested_token_of_the_template_is_refused(make_tokenizer: TokenizerMaker) -> None:
    tokenizer = make_tokenizer(CHATML + "<unused_a>", special=SPECIAL)
    with pytest.raises(ValueError, match="the chat template writes it"):
        choose_mask_token(tokenizer, len(tokenizer), "<unused_a>")
