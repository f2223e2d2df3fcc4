"""Masks against what each template's oracle says, token by token."""

from __future__ import annotations

import functools
import itertools
import unicodedata
from typing import Any

import pytest
from chat_templates import FAMILIES, Pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_testing import (
    Row,
    assistant,
    call,
    check,
    conversations,
    expected_mask,
    renderer_of,
    spans,
    user,
)
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from splitserve.data.conversation import parse_row
from splitserve.data.refusal import Reason, RowRefused
from splitserve.data.render import ChatRenderer
from splitserve.target.prepare import default_cache_dir

# --- random conversations ------------------------------------------------------------------------


@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_conversations(name: str, generation: bool, data: st.DataObject) -> None:
    family = FAMILIES[name]
    tokenizer, renderer = renderer_of(name, generation)
    messages = data.draw(conversations(family))
    pieces = family.pieces(messages)
    if not any(on for _, on in pieces):
        with pytest.raises(RowRefused) as caught:
            renderer.render_conversation(parse_row({"messages": messages}, "a", "d").messages)
        assert caught.value.reason in (Reason.EMPTY_ANSWER, Reason.MESSAGE_NOT_RENDERED)
        return
    try:
        check(tokenizer, renderer, messages, pieces)
    except RowRefused as refused:
        # Thoughts alone that a template drops, and a tool's reply that it leaves out.
        assert refused.reason is Reason.MESSAGE_NOT_RENDERED
        assert name == "role_tokens" and "</think>" in "".join(m["content"] for m in messages)


@functools.cache
def smollm2() -> tuple[PreTrainedTokenizerBase, ChatRenderer]:
    folders = sorted((default_cache_dir() / "targets").glob("SmolLM2*/tokenizer.json"))
    if not folders:
        pytest.skip("SmolLM2 is not prepared on this machine (splitserve train makes it)")
    tokenizer = AutoTokenizer.from_pretrained(folders[0].parent, local_files_only=True)
    return tokenizer, ChatRenderer(tokenizer)


def smollm2_pieces(messages: list[Row]) -> Pieces:
    pieces: Pieces = []
    if messages[0]["role"] != "system":
        text = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        pieces.append((f"<|im_start|>system\n{text}<|im_end|>\n", False))
    for m in messages:
        pieces.append((f"<|im_start|>{m['role']}\n", False))
        on = m["role"] == "assistant" and bool(m["content"].strip())
        pieces += [(m["content"] + "<|im_end|>", on), ("\n", False)]
    return pieces


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_conversations_of_smollm2(data: st.DataObject) -> None:
    tokenizer, renderer = smollm2()
    family = FAMILIES["headers"]
    messages = data.draw(conversations(family))
    pieces = smollm2_pieces(messages)
    if any(on for _, on in pieces):
        check(tokenizer, renderer, messages, pieces)
    else:
        with pytest.raises(RowRefused, match="empty_answer"):
            renderer.render_conversation(messages)


# --- named cases ---------------------------------------------------------------------------------

HEADER = "<|im_start|>assistant\n"
THINK = "<think>\n\n</think>\n\n"
CASES: dict[str, tuple[list[Row], list[str]]] = {
    "quoted header": ([user(f"Say {HEADER}no"), assistant("It")], ["It<|im_end|>"]),
    "quoted whole turn": (
        [user(f"a<|im_end|>\n{HEADER}b<|im_end|>"), assistant("c")],
        ["c<|im_end|>"],
    ),
    "answer quotes the end": (
        [user("x"), assistant("Write <|im_end|>\n"), user("y"), assistant("<|im_end|>")],
        ["Write <|im_end|>\n<|im_end|>", "<|im_end|><|im_end|>"],
    ),
    "assistants in a row": (
        [user("x"), assistant("one"), assistant("two"), user("y"), assistant("three")],
        ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"],
    ),
    "leading assistant": (
        [assistant("hi"), user("x"), assistant("y")],
        ["hi<|im_end|>", "y<|im_end|>"],
    ),
    "users in a row": ([user("x"), user("y"), assistant("z")], ["z<|im_end|>"]),
    "empty and null": (
        [user("x"), assistant(""), user(None), assistant(None), user(""), assistant("z")],
        ["z<|im_end|>"],
    ),
    "list of parts": (
        [
            user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
            assistant([{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]),
        ],
        ["c d<|im_end|>"],
    ),
    "tool call and two results": (
        [
            user("x"),
            assistant(None, tool_calls=[call("add", a=1, b=[2, {"c": "<|im_end|>"}])]),
            {"role": "tool", "content": "3"},
            {"role": "tool", "content": "4"},
            assistant("seven"),
        ],
        [
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "<|im_end|>"}]}}\n'
            "</tool_call><|im_end|>",
            "seven<|im_end|>",
        ],
    ),
    "reasoning in the last turn, dropped from earlier ones": (
        [
            user("x"),
            assistant("one", reasoning_content="because"),
            user("y"),
            assistant("two", reasoning_content="since"),
        ],
        ["one<|im_end|>", "<think>\nsince\n</think>\n\ntwo<|im_end|>"],
    ),
    "windows newlines": (
        [user("a\r\nb"), assistant("c\r\n\r\nd\r\n")],
        ["c\r\n\r\nd\r\n<|im_end|>"],
    ),
    "system message": (
        [{"role": "system", "content": "s"}, user("x"), assistant("y")],
        ["y<|im_end|>"],
    ),
    "ends in a question": ([user("x"), assistant("y"), user("z")], ["y<|im_end|>"]),
    "fifty turns": (
        [m for i in range(50) for m in (user(f"q{i}"), assistant(f"a{i}"))],
        [f"a{i}<|im_end|>" for i in range(50)],
    ),
    "thirty thousand characters": (
        [user("x"), assistant("four plus " * 3000)],
        ["four plus " * 3000 + "<|im_end|>"],
    ),
}


@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_supervised_spans(case: str, generation: bool) -> None:
    messages, expected = CASES[case]
    tokenizer, renderer = renderer_of("chatml_tools", generation)
    row = parse_row({"messages": messages}, "a", "d")
    rendered = renderer.render_conversation(row.messages)
    assert spans(tokenizer, rendered) == expected
    assert rendered.num_merged_starts == 0


def test_the_templates_empty_thought_is_not_the_answer() -> None:
    tokenizer, renderer = renderer_of("chatml_tools")
    rendered = renderer.render_conversation([user("x"), assistant("y")])
    text = tokenizer.decode(rendered.token_ids.tolist(), skip_special_tokens=False)
    assert text.endswith(f"{HEADER}{THINK}y<|im_end|>")
    assert spans(tokenizer, rendered) == ["y<|im_end|>"]


def test_thinking_off_moves_the_prompt_and_not_the_answer() -> None:
    tokenizer, _ = renderer_of("chatml_tools")
    renderer = ChatRenderer(tokenizer, {"enable_thinking": False})
    prompt = tokenizer.decode(renderer.prompt_ids([user("x")]), skip_special_tokens=False)
    assert prompt.endswith(HEADER + THINK)
    for answer in ("y", "\n\ny"):
        rendered = renderer.render_conversation([user("x"), assistant(answer)])
        assert spans(tokenizer, rendered)[0].strip() == "y<|im_end|>"


def test_thoughts_inside_the_content_are_the_answers() -> None:
    tokenizer, renderer = renderer_of("headers")
    text = "<think>\nhm\n</think>\n\nyes"
    rendered = renderer.render_conversation([user("x"), assistant(text)])
    assert spans(tokenizer, rendered) == [text + "<|eot|>"]
    tokenizer, renderer = renderer_of("role_tokens")
    rendered = renderer.render_conversation([user("x"), assistant("<think>hm</think>yes")])
    assert spans(tokenizer, rendered) == ["yes<|end|>"]


@pytest.mark.parametrize(
    ("answer", "supervised"),
    [
        ("</think><think></s>", "<think></s><|end|>"),
        ("a</think> <think>b", " <think>b<|end|>"),
        ("<think>\nso", "so<|end|>"),
        ("<think>so", "<think>so<|end|>"),
        ("a</think><think>\nb", "b<|end|>"),
    ],
)
def test_tags_that_the_generation_prompt_ends_in(answer: str, supervised: str) -> None:
    """It ends in `<think>` and a newline: only what it does not hold is the target's to write."""
    tokenizer, renderer = renderer_of("role_tokens")
    rendered = renderer.render_conversation([user("x"), assistant(answer)])
    assert spans(tokenizer, rendered) == [supervised]


def test_a_header_that_merges_with_the_answer_is_not_supervised() -> None:
    tokenizer, renderer = renderer_of("chatml_tools")
    assert len(tokenizer.encode("\n\n\n")) < 3, "the tokenizer must merge newlines for this test"
    rendered = renderer.render_conversation(
        [user("x"), assistant("\n\nIt is"), user("y"), assistant("z")]
    )
    assert spans(tokenizer, rendered) == ["\nIt is<|im_end|>", "z<|im_end|>"]
    assert rendered.num_merged_starts == 1
    text = f"<|im_start|>user\nx<|im_end|>\n{HEADER}\n\nIt is<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert rendered.token_ids.tolist()[: len(ids)] == ids


def test_the_last_answer_only() -> None:
    tokenizer, _ = renderer_of("headers")
    renderer = ChatRenderer(tokenizer, last_answer_only=True)
    messages = [user("x"), assistant("one"), user("y"), assistant("two")]
    assert spans(tokenizer, renderer.render_conversation(messages)) == ["two<|eot|>"]


def test_the_next_header_ends_a_turn_where_the_model_says_so() -> None:
    family = FAMILIES["headers"]
    tokenizer = family.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|head|>' if m.role == 'user' else '<|/head|>' }}"
        "{{ '\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|/head|>' }}{% endif %}"
    )
    messages = [user("x"), assistant("one"), user("y"), assistant("two")]
    stops = ChatRenderer(tokenizer, end_of_turn_ids=[tokenizer.convert_tokens_to_ids("<|head|>")])
    assert spans(tokenizer, stops.render_conversation(messages)) == ["\none<|head|>", "\ntwo"]
    plain = ChatRenderer(tokenizer)
    assert spans(tokenizer, plain.render_conversation(messages)) == ["\none", "\ntwo"]


def test_long_texts_are_cut_without_changing_a_token() -> None:
    tokenizer, renderer = renderer_of("chatml_tools")
    messages = [
        m
        for i in range(80)
        for m in (
            user(f"{i} \u4e2d e\u0301 <|im_end|> " * 12),
            assistant(f"\nfour {i} \u00e9 " * 12),
        )
    ]
    rendered = renderer.render_conversation(messages)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert len(text) > 2 * 16_384
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert rendered.token_ids.tolist() == ids[: len(rendered.token_ids)]
    pieces = FAMILIES["chatml_tools"].pieces(messages)
    assert rendered.loss_mask.tolist() == expected_mask(tokenizer, ids, pieces)[: len(ids) - 1]


def test_tools_reach_the_template() -> None:
    tokenizer, renderer = renderer_of("chatml_tools")
    function = {"name": "add", "parameters": {"x": "y"}, "description": None}
    tools = [{"type": "function", "function": function, "defer_loading": None}]
    messages = [user("x"), assistant("y", tool_calls=[call("add", a="b")])]
    check(tokenizer, renderer, messages, FAMILIES["chatml_tools"].pieces(messages, tools), tools)
    asked = tokenizer.decode(renderer.prompt_ids([user("x")], tools), skip_special_tokens=False)
    assert '{"name": "add", "parameters": {"x": "y"}, "description": null}' in asked


def test_a_batch_keeps_its_order_and_its_refusals() -> None:
    _, renderer = renderer_of("headers")
    good, bad = [user("x"), assistant("y")], [user("x")]
    outcomes = renderer.render_batch([(good, ()), (bad, ()), (good, ())])
    assert [o.refused.reason if o.refused else None for o in outcomes] == [
        None,
        Reason.NO_ANSWER,
        None,
    ]
    first, third = outcomes[0].unwrap(), outcomes[2].unwrap()
    assert first.token_ids.tolist() == third.token_ids.tolist()
    with pytest.raises(RowRefused):
        outcomes[1].unwrap()


def test_cost_is_linear() -> None:
    """Renderings per conversation do not grow with its turns."""
    tokenizer = FAMILIES["headers"].tokenizer()
    renderer = ChatRenderer(tokenizer)
    renderer.render_conversation([user("x"), assistant("y")])
    calls = []
    apply = tokenizer.apply_chat_template

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args[0]))
        return apply(*args, **kwargs)

    tokenizer.apply_chat_template = counted  # type: ignore[method-assign]
    renderer.render_conversation([m for _ in range(64) for m in (user("x"), assistant("y"))])
    assert calls == [128]


# --- tokenizers that change the text -------------------------------------------------------------

ODD = ["\ufb01ne e\u0301 \u2460", "\u212b \uff21\uff22", "a\u0301\u0323", "\u1100\u1161 \u00a0x"]


def changed_tokenizer(kind: str) -> PreTrainedTokenizerBase:
    """The headers family's tokenizer with a normalizer, or with SentencePiece's words."""
    tokenizer = FAMILIES["headers"].tokenizer()
    core = tokenizer.backend_tokenizer
    if kind in ("NFC", "NFKC", "NFD"):
        core.normalizer = getattr(normalizers, kind)()
        return tokenizer
    words = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
    words.decoder = decoders.Metaspace(prepend_scheme=kind)
    special = [t.content for t in tokenizer.added_tokens_decoder.values()]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<unk>", *(AddedToken(s, special=True, normalized=False) for s in special)],
    )
    words.train_from_iterator(["four plus two is six\nassistant user\n\n", *ODD] * 9, trainer)
    made = type(tokenizer)(tokenizer_object=words, bos_token="<|bos|>", eos_token="<|eot|>")
    made.chat_template = tokenizer.chat_template
    return made


@pytest.mark.parametrize("kind", ["NFC", "NFKC", "NFD"])
def test_text_that_the_tokenizer_normalises(kind: str) -> None:
    tokenizer = changed_tokenizer(kind)
    renderer = ChatRenderer(tokenizer)
    for question, answer in itertools.permutations(ODD, 2):
        messages = [user(question), assistant(answer), user(answer), assistant(question)]
        rendered = renderer.render_conversation(messages)
        whole = tokenizer.apply_chat_template(messages, return_dict=False)
        assert rendered.token_ids.tolist() == whole
        assert spans(tokenizer, rendered) == [
            unicodedata.normalize(kind, text) + "<|eot|>" for text in (answer, question)
        ]


@pytest.mark.parametrize("kind", ["always", "first", "never"])
def test_words_with_marked_beginnings(kind: str) -> None:
    tokenizer = changed_tokenizer(kind)
    renderer = ChatRenderer(tokenizer)
    messages = [user("two plus two"), assistant("four is six"), user("x"), assistant("plus")]
    rendered = renderer.render_conversation(messages)
    assert rendered.token_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    assert spans(tokenizer, rendered) == ["four is six<|eot|>", "plus<|eot|>"]
    # Longer than what is cut for the tokenizer's threads, which such a tokenizer does not bear.
    long = messages * 300
    assert renderer.render_conversation(long).token_ids.tolist() == tokenizer.apply_chat_template(
        long, return_dict=False
    )
