from __future__ import annotations

import pytest
from chat_tokenizer import CHATML, TokenizerMaker
from transformers import PreTrainedTokenizerFast

from splitserve.data.refusal import Reason, RowRefused
from splitserve.data.render import ChatRenderer

HEADER = "<|im_start|>assistant\n"


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def supervised_text(renderer: ChatRenderer, messages: list[dict[str, str]]) -> str:
    ids, mask = renderer.render_conversation(messages)
    assert len(ids) == len(mask)
    return renderer.decode([token for token, on in zip(ids, mask, strict=True) if on])


def test_prompt_ids_are_the_templates(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = ChatRenderer(tokenizer).prompt_ids([user("What is two plus two?")])
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is two plus two?<|im_end|>\n" + HEADER
    )
    assert ids == tuple(tokenizer.encode(text, add_special_tokens=False))


def test_exact_supervised_positions_and_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(tokenizer)
    question = [user("What is two plus two?")]
    prompt = renderer.prompt_ids(question)
    answer = tokenizer.encode("It is four.", add_special_tokens=False)
    ids, mask = renderer.render_conversation([*question, assistant("It is four.")])
    assert ids == (*prompt, *answer, tokenizer.eos_token_id)
    expected = list(enumerate([*answer, tokenizer.eos_token_id], start=len(prompt)))
    assert [(i, t) for i, (t, on) in enumerate(zip(ids, mask, strict=True)) if on] == expected


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user("Say " + HEADER + "no"), assistant("It is")], "It is<|im_end|>"),
        ([user("a<|im_end|>\n" + HEADER + "b"), assistant("c")], "c<|im_end|>"),
        ([user("x"), assistant("Write <|im_end|> there")], "Write <|im_end|> there<|im_end|>"),
        ([user("x"), assistant("A <|im_end|>\n")], "A <|im_end|>\n<|im_end|>"),
        ([user("x"), assistant("Quote " + HEADER + "y")], f"Quote {HEADER}y<|im_end|>"),
        ([user("x"), assistant("one"), user("y"), assistant("two")], "two<|im_end|>"),
        ([user("x"), user("y"), assistant("four")], "four<|im_end|>"),
        ([user("x"), assistant("one"), assistant("two")], "two<|im_end|>"),
    ],
)
def test_only_the_last_answer_and_its_end_are_supervised(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], expected: str
) -> None:
    assert supervised_text(ChatRenderer(tokenizer), messages) == expected


def test_an_answer_that_merges_with_the_header_is_refused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert len(tokenizer.encode("\n\n\n")) < 3, "the tokenizer must merge newlines for this test"
    with pytest.raises(RowRefused) as caught:
        ChatRenderer(tokenizer).render_conversation([user("x"), assistant("\n\nIt is")])
    assert caught.value.reason is Reason.PROMPT_NOT_A_PREFIX
    assert caught.value.token_ids


def test_rows_without_an_answer_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(tokenizer)
    for messages, reason in (
        ([user("x")], Reason.NOT_AN_ANSWER),
        ([assistant("x")], Reason.NOT_AN_ANSWER),
        ([user("x"), assistant(" \n")], Reason.EMPTY_ANSWER),
    ):
        with pytest.raises(RowRefused) as caught:
            renderer.render_conversation(messages)
        assert caught.value.reason is reason
    with pytest.raises(RowRefused) as caught:
        renderer.prompt_ids([user("x"), assistant("y")])
    assert caught.value.reason is Reason.NOT_A_QUESTION


def test_system_prompt_replaces_the_templates_own(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(tokenizer, system_prompt="You are kind.")
    own = [{"role": "system", "content": "Mine."}, user("x")]
    assert renderer.decode(renderer.prompt_ids([user("x")])).startswith(
        "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user"
    )
    assert "You are kind." not in renderer.decode(renderer.prompt_ids(own))
    assert "Be brief." in renderer.decode(ChatRenderer(tokenizer).prompt_ids([user("x")]))


def test_a_system_prompt_that_the_template_does_not_show_is_refused(
    make_tokenizer: TokenizerMaker,
) -> None:
    ignores = CHATML.replace("{% for m in messages %}", "{% for m in messages[-1:] %}")
    with pytest.raises(ValueError, match=r"data\.system_prompt.*does not appear"):
        ChatRenderer(make_tokenizer(ignores), system_prompt="You are kind.")
    raises = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(ValueError, match=r"data\.system_prompt.*no system"):
        ChatRenderer(make_tokenizer(raises + CHATML), system_prompt="You are kind.")


def test_template_arguments_reach_the_template(make_tokenizer: TokenizerMaker) -> None:
    thinking = CHATML + "{% if think %}{{ 'Two' }}{% endif %}"
    renderer = ChatRenderer(make_tokenizer(thinking), {"think": True})
    assert renderer.decode(renderer.prompt_ids([user("x")])).endswith(HEADER + "Two")
    with pytest.raises(ValueError, match=r"data\.chat_template_kwargs: return_dict, tokenize"):
        ChatRenderer(make_tokenizer(), {"tokenize": False, "return_dict": True})


def test_a_tokenizer_without_template_is_refused(make_tokenizer: TokenizerMaker) -> None:
    with pytest.raises(ValueError, match=r"chat template.*chat_template\.jinja"):
        ChatRenderer(make_tokenizer(None))


def test_a_failing_template_refuses_the_row(make_tokenizer: TokenizerMaker) -> None:
    raises = "{% if messages|length > 1 %}{{ raise_exception('must alternate') }}{% endif %}"
    with pytest.raises(RowRefused, match=r"user, user.*must alternate") as caught:
        ChatRenderer(make_tokenizer(raises + CHATML)).prompt_ids([user("x"), user("y")])
    assert caught.value.reason is Reason.TEMPLATE_ERROR


def test_a_template_without_an_end_of_turn_cannot_take_answers(
    make_tokenizer: TokenizerMaker,
) -> None:
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    renderer = ChatRenderer(make_tokenizer(plain))
    with pytest.raises(ValueError, match="closes an assistant turn"):
        renderer.render_conversation([user("x"), assistant("y")])


def test_an_answer_that_the_template_rewrites_at_its_end_is_refused(
    make_tokenizer: TokenizerMaker,
) -> None:
    odd = CHATML.replace(
        "{% endfor %}", "{% if 'odd' in m['content'] %}{{ 'more' }}{% endif %}{% endfor %}"
    )
    with pytest.raises(RowRefused) as caught:
        ChatRenderer(make_tokenizer(odd)).render_conversation([user("x"), assistant("odd")])
    assert caught.value.reason is Reason.ANSWER_END_MERGED
