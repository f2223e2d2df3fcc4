from __future__ import annotations

import pytest
from chat_tokenizer import CHATML, TokenizerMaker
from transformers import PreTrainedTokenizerFast

from splitserve.data.encode import Encoder
from splitserve.data.refusal import Reason, RowRefused
from splitserve.data.render import ChatRenderer

HEADER = "<|im_start|>assistant\n"


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


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
    rendered = renderer.render_conversation([*question, assistant("It is four.")])
    ids, mask = rendered.token_ids.tolist(), rendered.loss_mask.tolist()
    assert ids == [*prompt, *answer, tokenizer.eos_token_id]
    expected = list(enumerate([*answer, tokenizer.eos_token_id], start=len(prompt)))
    assert [(i, t) for i, (t, on) in enumerate(zip(ids, mask, strict=True)) if on] == expected


def test_a_prompt_does_not_end_in_an_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(RowRefused) as caught:
        ChatRenderer(tokenizer).prompt_ids([user("x"), assistant("y")])
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


def test_without_an_end_of_turn_the_answer_alone_is_supervised(
    make_tokenizer: TokenizerMaker,
) -> None:
    plain = "{% for m in messages %}{{ m['role'] + ':\\n' + m['content'] + '\\n' }}{% endfor %}"
    tokenizer = make_tokenizer(plain)
    rendered = ChatRenderer(tokenizer).render_conversation([user("x"), assistant("four")])
    assert tokenizer.decode(rendered.token_ids[rendered.loss_mask]) == "four"


def test_a_tokenizer_without_places_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    class Slow:
        name_or_path = "slow"
        is_fast = False

    with pytest.raises(ValueError, match=r"tokenizer 'slow'.*tokenizer\.json"):
        Encoder(Slow())  # type: ignore[arg-type]


def test_a_tokenizer_that_changes_text_by_itself_is_refused(
    make_tokenizer: TokenizerMaker,
) -> None:
    tokenizer = make_tokenizer()

    class Prefixed(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: str, **kwargs: object) -> object:
            return super().__call__("!" + text, **kwargs)

    tokenizer.__class__ = Prefixed
    with pytest.raises(ValueError, match="places of its tokens are unknown"):
        Encoder(tokenizer)


def test_a_template_that_jinja_cannot_read_is_named(make_tokenizer: TokenizerMaker) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}"
    with pytest.raises(ValueError, match=r"no template that jinja2 reads .*restore"):
        ChatRenderer(tokenizer)
