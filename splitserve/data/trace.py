"""Where in a rendered conversation each message and each answer stands.

The tokenizer's chat template is run a second time, on the same conversation, with single
private-use characters as marks: the template's loops write one where a message begins and ends,
and the assistant's texts carry one at either end. Taken out again, the marks must leave exactly
what the template renders without them; then their places are true, whatever a user quotes from
the template. Where the texts differ, the template reads or trims the marked text, and other places
for the marks are tried. Cost: one or two renderings, linear in the length.

Source: the loop marks are put into the syntax tree that jinja2 parses from the template.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, nodes
from jinja2.visitor import NodeTransformer

from splitserve.data.conversation import Message

_OPEN, _CLOSE = "_splitserve_open", "_splitserve_close"
_PLANES = ((0x100000, 0x10FFFD), (0xF0000, 0xFFFFD))
"""The two private-use planes; a conversation may use either, not both."""
_Item = tuple[str, str]
"""A list's name and the variable that it is indexed by; empty is `loop.index0`."""
_TAGS = re.compile(r"(</?[^\s<>/]{0,12}think[^\s<>]{0,12}>|\[/?THINK\])")
"""Tags by which templates cut a thought off an answer."""


class NotTraced(Exception):  # noqa: N818 - an expected outcome, as its name says
    """An answer cannot be followed through the template; the text says why."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer's place in the rendered text, in characters."""

    message: int
    """Index of the message."""
    begin: int
    """Where the message's rendering begins, its header included."""
    first: int
    """Where the first of the assistant's own text begins."""
    first_is_answer: bool
    """That text is the answer itself: no thought and no tool call stands before it."""
    last: int
    """Where the last of it ends."""
    end: int
    """Where the message's rendering ends."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What was found out about a rendered conversation."""

    turns: tuple[Turn, ...]
    missing: tuple[int, ...]
    """Messages that no loop of the template has written anything for."""


@dataclass(frozen=True, slots=True)
class _Placing:
    """One way of placing marks in the assistant's messages."""

    outside: bool
    """Beside the white space around a text, not between it and the text."""
    ends: bool
    """Also around a content as a whole, tags included."""
    tools: bool


_PLACINGS = (
    _Placing(outside=True, ends=True, tools=True),
    _Placing(outside=False, ends=True, tools=True),
    _Placing(outside=False, ends=False, tools=True),
    _Placing(outside=False, ends=False, tools=False),
)


class TemplateTracer:
    """Traces conversations through one chat template.

    Args:
        compiled: the template as transformers compiles it, for its environment.
        source: its text.
    """

    def __init__(self, compiled: Template, source: str) -> None:
        # Filters and not functions: the sandbox looks at every call of a function.
        environment = compiled.environment.overlay()
        environment.filters = {
            **environment.filters,
            _OPEN: lambda value: self._mark(value, closing=False),
            _CLOSE: lambda value: self._mark(value, closing=True),
        }
        tree = _Instrument().visit(environment.parse(source))
        for node in tree.find_all(nodes.Node):
            node.set_environment(environment)
        tree.set_environment(environment)
        code = environment.compile(tree, "chat_template", "chat_template")
        self._template = Template.from_code(environment, code, environment.make_globals(None))
        self._index: dict[int, int] = {}
        """Of the messages that are being rendered, by identity."""
        self._base = 0

    def _mark(self, given: tuple[list[object], list[object]], *, closing: bool) -> str:
        """The mark of the message among a loop's variables, or else among what they lead to."""
        for values in given:
            messages = {self._index[id(value)] for value in values if id(value) in self._index}
            if len(messages) > 1:
                raise NotTraced("a loop of the chat template writes several messages at a time")
            if messages:
                return chr(self._base + 2 * messages.pop() + closing)
        return ""

    def trace(self, plain: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> Trace:
        """Find every answer in `plain`, which the template has rendered from the same arguments.

        Raises:
            NotTraced: an answer is changed by the template, written twice or not in a loop over
                the messages.
        """
        base, pattern = _plane(plain)
        for placing in _PLACINGS:
            marks = _Marks(base, len(messages))
            marked = [_marked(i, m, marks, placing) for i, m in enumerate(messages)]
            self._base, self._index = base, {id(m): i for i, m in enumerate(marked)}
            text = self._template.render(messages=marked, **variables)
            found = [
                (m.start() - k, ord(m[0]) - base) for k, m in enumerate(pattern.finditer(text))
            ]
            if pattern.sub("", text) == plain:
                return _read(found, marks, messages, len(plain))
        raise NotTraced("the chat template changes the text of an answer")


def _plane(plain: str) -> tuple[int, re.Pattern[str]]:
    for low, high in _PLANES:
        pattern = re.compile(f"[{chr(low)}-{chr(high)}]")
        if not pattern.search(plain):
            return low, pattern
    raise NotTraced("the text has characters of both private-use planes")


class _Instrument(NodeTransformer):
    """Put marks around the body of every loop.

    What a loop writes is the message that it is at: one of its variables, or else what it takes out
    of a list by such a variable or by `loop.index0`.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's name
        names = {n.name for n in _names(node.target)}
        items = [_if_defined(item) for item in _indexed(node.body, names)]
        self.generic_visit(node)
        variables = [nodes.Name(name, "load") for name in sorted(names)]
        opening, closing = (
            nodes.Output([_filtered(name, variables, items)]) for name in (_OPEN, _CLOSE)
        )
        for output in (opening, closing):
            output.set_lineno(node.lineno, override=True)
        node.body = [opening, *node.body, closing]
        return node


def _names(target: nodes.Node) -> list[nodes.Name]:
    return [target] if isinstance(target, nodes.Name) else list(target.find_all(nodes.Name))


def _indexed(body: Sequence[nodes.Node], names: set[str], nested: bool = False) -> list[_Item]:
    """Every `list[variable]` and `list[loop.index0]` in a loop's body, each once."""
    found: dict[_Item, None] = {}
    for node in body:
        if isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name):
            arg = node.arg
            if isinstance(arg, nodes.Name) and arg.name in names:
                found[node.node.name, arg.name] = None
            if not nested and _is_index_of_loop(arg):
                found[node.node.name, ""] = None
        inner = nested or isinstance(node, nodes.For)
        found |= dict.fromkeys(_indexed(list(node.iter_child_nodes()), names, inner))
    return list(found)


def _is_index_of_loop(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.Getattr)
        and node.attr == "index0"
        and isinstance(node.node, nodes.Name)
        and node.node.name == "loop"
    )


def _if_defined(item: _Item) -> nodes.Expr:
    """An item as an expression, nothing where its list is set later in the loop."""
    name, variable = item
    index: nodes.Expr = nodes.Name(variable, "load")
    if not variable:
        index = nodes.Getattr(nodes.Name("loop", "load"), "index0", "load")
    defined = nodes.Test(nodes.Name(name, "load"), "defined", [], [], None, None)
    taken = nodes.Getitem(nodes.Name(name, "load"), index, "load")
    return nodes.CondExpr(defined, taken, nodes.Const(None))


def _filtered(
    name: str, variables: Sequence[nodes.Expr], items: Sequence[nodes.Expr]
) -> nodes.Expr:
    given = nodes.Tuple([nodes.List(list(variables)), nodes.List(list(items))], "load")
    return nodes.Filter(given, name, [], [], None, None)


class _Marks:
    """The marks of one rendering: two for each message, then those in the assistant's texts."""

    def __init__(self, base: int, num_messages: int) -> None:
        self._base = base
        self._limit = base + 0xFFFD
        if base + 2 * num_messages > self._limit:
            raise NotTraced("the conversation has more messages than there are marks")
        self.num_messages = num_messages
        self.inside: list[tuple[int, str, bool]] = []
        """(message, kind, closing) of each further mark."""

    def new(self, message: int, kind: str, closing: bool) -> str:
        self.inside.append((message, kind, closing))
        place = self._base + 2 * self.num_messages + len(self.inside) - 1
        if place > self._limit:
            raise NotTraced("the conversation has more parts than there are marks")
        return chr(place)

    def around(self, text: str, message: int, kind: str, outside: bool) -> str:
        """The text between two marks; the text itself where it is blank."""
        core = text.strip()
        if not core:
            return text
        lead, trail = "", ""
        if not outside:
            start = text.index(core)
            lead, trail = text[:start], text[start + len(core) :]
            text = core
        return f"{lead}{self.new(message, kind, False)}{text}{self.new(message, kind, True)}{trail}"


def _marked(number: int, message: Message, marks: _Marks, placing: _Placing) -> Message:
    made = dict(message)
    if message["role"] != "assistant":
        return made
    if thought := message.get("reasoning_content"):
        made["reasoning_content"] = marks.around(thought, number, "thought", placing.outside)
    content = message["content"]
    if isinstance(content, str):
        made["content"] = _marked_text(content, number, marks, placing)
    else:
        made["content"] = [
            {**part, "text": _marked_text(part["text"], number, marks, placing)} for part in content
        ]
    if placing.tools and message.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "function": _marked_leaves(call["function"], number, marks)}
            for call in message["tool_calls"]
        ]
    return made


def _marked_text(text: str, number: int, marks: _Marks, placing: _Placing) -> str:
    pieces = _TAGS.split(text)
    if len(pieces) == 1:
        return marks.around(text, number, "answer", placing.outside)
    # A tag at the odd places; before a closing one stands a thought. Templates cut off what is
    # before the last closing tag, so what is after it is marked as a whole too.
    parts: list[str] = []
    part = ""
    for k, piece in enumerate(pieces):
        closes = k + 1 < len(pieces) and "/" in pieces[k + 1]
        kind = "thought" if closes else "answer"
        part += piece if k % 2 else marks.around(piece, number, kind, placing.outside)
        if k % 2 and "/" in piece:
            parts.append(part)
            part = ""
    if placing.ends and parts and _TAGS.search(part):
        part = marks.around(part, number, "answer", placing.outside)
    body = "".join([*parts, part])
    return marks.around(body, number, "answer", placing.outside) if placing.ends else body


def _marked_leaves(value: Any, number: int, marks: _Marks) -> Any:
    """Every text in a tool call between two marks; keys as they are."""
    if isinstance(value, str):
        return marks.around(value, number, "tool", True)
    if isinstance(value, Mapping):
        return {key: _marked_leaves(item, number, marks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked_leaves(item, number, marks) for item in value]
    return value


def _read(
    found: Sequence[tuple[int, int]], marks: _Marks, messages: Sequence[Message], length: int
) -> Trace:
    """Places of marks, as (place in the plain text, number), into turns."""
    num = len(messages)
    loops = [(place, n // 2, n % 2) for place, n in found if n < 2 * num]
    extents = _extents(loops, num, length)
    inside: list[list[tuple[int, str, bool]]] = [[] for _ in range(num)]
    for place, n in found:
        if n >= 2 * num:
            message, kind, closing = marks.inside[n - 2 * num]
            inside[message].append((place, kind, closing))
    meant = {message for message, _, _ in marks.inside}
    turns = []
    for i in sorted(meant):
        if not extents[i]:
            # Left out altogether, or written outside of any loop over the messages.
            if inside[i]:
                raise NotTraced("the chat template does not write messages in a loop over them")
            continue
        if len(extents[i]) > 1:
            raise NotTraced(f"the chat template writes message {i} more than once")
        begin, end = extents[i][0]
        opening = [(p, kind) for p, kind, closing in inside[i] if not closing and begin <= p <= end]
        closing_places = [p for p, _, closing in inside[i] if closing and begin <= p <= end]
        if not opening or not closing_places:
            continue
        first, kind = min(opening, key=lambda mark: mark[0])
        turns.append(Turn(i, begin, first, kind == "answer", max(closing_places), end))
    written = {i for i in range(num) if extents[i]}
    traced = {turn.message for turn in turns}
    missing = tuple(i for i in range(num) if i not in written or (i in meant and i not in traced))
    return Trace(tuple(turns), missing)


def _extents(
    loops: Sequence[tuple[int, int, int]], num_messages: int, length: int
) -> list[list[tuple[int, int]]]:
    """Where each message was written, by the loops' marks; empty stretches are left out."""
    opens: list[list[int]] = [[] for _ in range(num_messages)]
    closes: list[list[int]] = [[] for _ in range(num_messages)]
    for k, (_, message, closing) in enumerate(loops):
        (closes if closing else opens)[message].append(k)
    extents: list[list[tuple[int, int]]] = [[] for _ in range(num_messages)]
    for message in range(num_messages):
        for n, k in enumerate(opens[message]):
            limit = opens[message][n + 1] if n + 1 < len(opens[message]) else len(loops)
            at = bisect_left(closes[message], k)
            if at < len(closes[message]) and closes[message][at] < limit:
                end = loops[closes[message][at]][0]
            else:
                # The loop was left early: the message ends where the next one begins.
                end = loops[k + 1][0] if k + 1 < len(loops) else length
            if end > loops[k][0]:
                extents[message].append((loops[k][0], end))
    return extents
