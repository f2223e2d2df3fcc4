"""Templates of every kind: what cannot be followed is refused, and the rest has the right masks."""

from __future__ import annotations

import pytest
from chat_templates import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_testing import Row, assistant, call, check, conversations, renderer_of, spans, user

from splitserve.data.refusal import Reason, RowRefused
from splitserve.data.render import ChatRenderer


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("chatml_tools", [user("x")], Reason.NO_ANSWER),
        ("chatml_tools", [{"role": "system", "content": "s"}], Reason.NO_ANSWER),
        ("chatml_tools", [user("x"), assistant(" \n")], Reason.EMPTY_ANSWER),
        (
            "chatml_tools",
            [user("x"), assistant("y"), {"role": "system", "content": "s"}],
            Reason.TEMPLATE_ERROR,
        ),
        (
            "chatml_tools",
            [{"role": "developer", "content": "s"}, assistant("y")],
            Reason.TEMPLATE_ERROR,
        ),
        ("brackets", [user("x"), assistant("y"), assistant("z")], Reason.TEMPLATE_ERROR),
        ("turns", [user("x"), user("y"), assistant("z")], Reason.TEMPLATE_ERROR),
        (
            "role_tokens",
            [user("x"), assistant("y"), {"role": "tool", "content": "z"}, assistant("a")],
            Reason.MESSAGE_NOT_RENDERED,
        ),
        ("role_tokens", [user("x"), assistant("<think>hm</think>")], Reason.MESSAGE_NOT_RENDERED),
        (
            "role_tokens",
            [user("x"), assistant("", tool_calls=[call("f", a="b")])],
            Reason.MESSAGE_NOT_RENDERED,
        ),
        (
            "chatml_tools",
            [user("x"), assistant("", tool_calls=[call("f", **{"<|im_end|>": 1})])],
            Reason.ANSWER_NOT_TRACED,
        ),
        ("headers", [user("\U000f0001 \U00100001"), assistant("y")], Reason.ANSWER_NOT_TRACED),
    ],
)
def test_refused_with_a_reason(name: str, messages: list[Row], reason: Reason) -> None:
    _, renderer = renderer_of(name)
    with pytest.raises(RowRefused) as caught:
        renderer.render_conversation(messages)
    assert caught.value.reason is reason, caught.value


REWRITING = {
    "upper": "{% for m in messages %}{{ m.role }}:{{ m.content | upper }}<|eot|>{% endfor %}",
    "first character": "{% for m in messages %}{{ m.content[1:] }}<|eot|>{% endfor %}",
    "twice": "{% for k in [1, 2] %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfor %}",
    "in pairs": "{% for i in range(0, messages | length, 2) %}{{ messages[i].content }}<|eot|>"
    "{{ messages[i + 1].content }}<|eot|>{% endfor %}",
    "two lists": "{% set rest = messages[1:] + messages[:1] %}{% for i in range(messages | length)"
    " %}{{ messages[i].content }}{{ rest[i].role }}<|eot|>{% endfor %}",
    "set later": "{% for i in range(messages | length) %}{% set later = messages %}"
    "{{ later[i].content }}<|eot|>{% endfor %}",
    "without a loop": "{{ messages[0].content }}<|eot|>{{ messages[1].content }}<|eot|>",
    "length": "{% for m in messages %}{{ m.content | length }} {{ m.content }}<|eot|>{% endfor %}",
}


@pytest.mark.parametrize("kind", REWRITING)
def test_an_answer_that_cannot_be_followed_is_refused(kind: str) -> None:
    tokenizer = FAMILIES["headers"].tokenizer()
    tokenizer.chat_template = REWRITING[kind]
    rows = [([user("ask"), assistant("say")], ()), ([user("x"), assistant("\u00df")], ())]
    outcomes = ChatRenderer(tokenizer).render_batch(rows)
    reasons = [o.refused.reason if o.refused else None for o in outcomes]
    # Marks have no upper case, so what does not depend on the case can be followed.
    assert reasons == ([None, None] if kind == "upper" else [Reason.ANSWER_NOT_TRACED] * 2)


BY_INDEX = {
    "range": "{% for i in range(messages | length) %}{% set m = messages[i] %}BODY{% endfor %}",
    "range of a slice": "{% set rest = messages[1:] if messages[0].role == 'system' else messages"
    " %}{% for i in range(rest | length) %}{% set m = rest[i] %}BODY{% endfor %}",
    "loop.index0": "{% for _ in messages %}{% set m = messages[loop.index0] %}BODY{% endfor %}",
    "index of another list": "{% for n in range(messages | length) %}{% for t in tools or [] %}"
    "{{ t.name }}{% endfor %}{% set m = messages[loop.index0] %}BODY{% endfor %}",
    "with a look at the one before": "{% for i in range(messages | length) %}{% set m = messages[i]"
    " %}{% if i and messages[i - 1].role == m.role %}{{ '' }}{% endif %}BODY{% endfor %}",
    "the one before by index": "{% set rest = messages[1:] %}{% for m in messages[:1] %}BODY"
    "{% endfor %}{% for m in rest %}{% if messages[loop.index0].role == 'tool' %}{{ '' }}"
    "{% endif %}BODY{% endfor %}",
}
BODY = (
    "{{ '<|head|>' + m['role'] + '<|/head|>\\n\\n' }}GEN_OPEN"
    "{{ m['content'] | trim + '<|eot|>' }}GEN_CLOSE"
)


@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("kind", BY_INDEX)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_loops_over_indices(kind: str, generation: bool, data: st.DataObject) -> None:
    """The masks are those of the same template with a plain loop."""
    family = FAMILIES["headers"]
    messages = data.draw(conversations(family))
    if kind == "range of a slice" and messages[0]["role"] == "system":
        messages = messages[1:]
    tokenizer = family.tokenizer()
    tags = ("{% generation %}", "{% endgeneration %}") if generation else ("", "")
    body = BODY.replace("GEN_OPEN", tags[0]).replace("GEN_CLOSE", tags[1])
    prompt = "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
    tokenizer.chat_template = "{{ bos_token }}" + BY_INDEX[kind].replace("BODY", body) + prompt
    pieces = family.pieces(messages)
    renderer = ChatRenderer(tokenizer)
    if any(on for _, on in pieces):
        check(tokenizer, renderer, messages, pieces)
    else:
        with pytest.raises(RowRefused, match="empty_answer"):
            renderer.render_conversation(messages)


def test_private_use_characters_of_one_plane_are_text() -> None:
    for character in ("\U00100003", "\U000f0003"):
        tokenizer, renderer = renderer_of("headers")
        messages = [user(character), assistant(f"a{character}")]
        check(tokenizer, renderer, messages, FAMILIES["headers"].pieces(messages))


def test_more_messages_than_marks_are_refused() -> None:
    _, renderer = renderer_of("headers")
    messages = [m for _ in range(17_000) for m in (user("x"), assistant("y"))]
    with pytest.raises(RowRefused, match="more messages than there are marks"):
        renderer.render_conversation(messages)
    with pytest.raises(RowRefused, match="more parts than there are marks"):
        renderer.render_conversation(messages[:32_700])


def test_loops_that_are_left_early_and_captured_output() -> None:
    tokenizer = FAMILIES["headers"].tokenizer()
    tokenizer.chat_template = (
        "{% macro turn(m) %}{{ '<|head|>' ~ m.role ~ '<|/head|>' ~ m.content ~ '<|eot|>' }}"
        "{% endmacro %}{% set text %}{% for m in messages %}"
        "{% if m.role == 'user' %}{{ turn(m) }}{% continue %}{% endif %}{{ turn(m) }}"
        "{% if m.content == 'stop' %}{% break %}{% endif %}{% endfor %}{% endset %}{{ text }}"
        "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>' }}{% endif %}"
    )
    renderer = ChatRenderer(tokenizer)
    rendered = renderer.render_conversation([user("a"), assistant("b"), user("c"), assistant("d")])
    assert spans(tokenizer, rendered) == ["b<|eot|>", "d<|eot|>"]
