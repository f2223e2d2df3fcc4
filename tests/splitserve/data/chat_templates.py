"""Chat templates in the manner of well-known families, each with the text it ought to give.

An oracle writes a conversation as pieces of (text, supervised), straight from the messages and
without Jinja. The templates are worded here; none is copied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chat_tokenizer import build_tokenizer
from transformers import PreTrainedTokenizerFast

Messages = Sequence[dict[str, Any]]
Pieces = list[tuple[str, bool]]

# --- ChatML with tools and reasoning -------------------------------------------------------------

CHATML_TOOLS = """\
{%- set ns = namespace(last_user=-1) -%}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n' -}}{%- endif -%}
    {{- '# Tools' -}}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
    {%- if m.role == 'system' -%}
        {%- if not loop.first -%}{{- raise_exception('system comes first') -}}{%- endif -%}
        {%- continue -%}
    {%- elif m.role == 'user' -%}
        {{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' -}}
    {%- elif m.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
            {{- '<|im_end|>\\n' -}}
        {%- endif -%}
    {%- elif m.role == 'assistant' -%}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' -%}
        {{- '<|im_start|>assistant\\n' -}}
        GEN_OPEN
        {%- if loop.index0 > ns.last_user and (thought or loop.last) -%}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- m.content -}}
        {%- for call in m.tool_calls or [] -%}
            {%- if m.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>' -}}
        GEN_CLOSE
        {{- '\\n' -}}
    {%- else -%}
        {{- raise_exception('no such role: ' + m.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""


def chatml_tools_pieces(messages: Messages, tools: Sequence[Any] = ()) -> Pieces:
    def text_of(m: dict[str, Any]) -> str:
        return m.get("content") or ""

    pieces: Pieces = []
    first_is_system = messages[0]["role"] == "system"
    if tools:
        pieces.append(("<|im_start|>system\n", False))
        if first_is_system:
            pieces.append((text_of(messages[0]) + "\n", False))
        lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        pieces.append((f"# Tools{lines}<|im_end|>\n", False))
    elif first_is_system:
        pieces.append((f"<|im_start|>system\n{text_of(messages[0])}<|im_end|>\n", False))
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for i, m in enumerate(messages):
        text = text_of(m)
        if m["role"] == "user":
            pieces.append((f"<|im_start|>user\n{text}<|im_end|>\n", False))
        elif m["role"] == "tool":
            head = "" if i and messages[i - 1]["role"] == "tool" else "<|im_start|>user"
            more = i + 1 < len(messages) and messages[i + 1]["role"] == "tool"
            tail = "" if more else "<|im_end|>\n"
            body = f"{head}\n<tool_response>\n{text}\n</tool_response>{tail}"
            pieces.append((body, False))
        elif m["role"] == "assistant":
            pieces.append(("<|im_start|>assistant\n", False))
            thought = m.get("reasoning_content") or ""
            calls = "".join(
                ("\n" if text or k else "")
                + '<tool_call>\n{"name": "'
                + call["function"]["name"]
                + '", "arguments": '
                + json.dumps(call["function"]["arguments"], ensure_ascii=False)
                + "}\n</tool_call>"
                for k, call in enumerate(m.get("tool_calls", ()))
            )
            empty = not (text.strip() or calls)
            last = i == len(messages) - 1
            if i > last_user and (thought or last):
                pieces.append((f"<think>\n{thought}\n</think>\n\n", bool(thought.strip()) or (
                    bool(calls) and not text.strip())))  # fmt: skip
                empty = empty and not thought.strip()
            pieces.append((text + calls + "<|im_end|>", not empty))
            pieces.append(("\n", False))
    return pieces


# --- headers between special tokens, as in Llama 3 -----------------------------------------------

HEADERS = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' -}}
    GEN_OPEN
    {{- message['content'] | trim + '<|eot|>' -}}
    GEN_CLOSE
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|head|>assistant<|/head|>\\n\\n' -}}{%- endif -%}
"""


def headers_pieces(messages: Messages, tools: Sequence[Any] = ()) -> Pieces:
    pieces: Pieces = [("<|bos|>", False)]
    for m in messages:
        pieces.append((f"<|head|>{m['role']}<|/head|>\n\n", False))
        text = (m.get("content") or "").strip()
        pieces.append((f"{text}<|eot|>", m["role"] == "assistant" and bool(text)))
    return pieces


# --- questions between brackets, as in Mistral ---------------------------------------------------

BRACKETS = """\
{{- bos_token -}}
{%- set ns = namespace(asked=false, system='') -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {%- set ns.system = message['content'] + '\\n\\n' -%}
    {%- elif message['role'] == 'user' -%}
        {%- if ns.asked -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
        {{- '[INST] ' + ns.system + message['content'] + '[/INST]' -}}
        {%- set ns.asked = true -%}{%- set ns.system = '' -%}
    {%- elif message['role'] == 'assistant' -%}
        {%- if not ns.asked -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
        GEN_OPEN
        {{- ' ' + message['content'] + eos_token -}}
        GEN_CLOSE
        {%- set ns.asked = false -%}
    {%- else -%}
        {{- raise_exception('only user and assistant') -}}
    {%- endif -%}
{%- endfor -%}
"""


def brackets_pieces(messages: Messages, tools: Sequence[Any] = ()) -> Pieces:
    pieces: Pieces = [("<s>", False)]
    system = ""
    for m in messages:
        text = m.get("content") or ""
        if m["role"] == "system":
            system = text + "\n\n"
        elif m["role"] == "user":
            pieces.append((f"[INST] {system}{text}[/INST]", False))
            system = ""
        else:
            pieces.append((f" {text}</s>", bool(text.strip())))
    return pieces


# --- turns of user and model, as in Gemma --------------------------------------------------------

TURNS = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
    {%- set first = messages[0].content + '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('roles must alternate') -}}
    {%- endif -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {{- '<turn>' + role + '\\n' + (first if loop.first else '') -}}
    {%- if message.content is string -%}
        GEN_OPEN{{- message.content | trim -}}GEN_CLOSE
    {%- else -%}
        {%- for part in message.content -%}{{- part.text | trim -}}{%- endfor -%}
    {%- endif -%}
    {{- '</turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<turn>model\\n' -}}{%- endif -%}
"""


def turns_pieces(messages: Messages, tools: Sequence[Any] = ()) -> Pieces:
    def text_of(m: dict[str, Any]) -> str:
        content = m.get("content") or ""
        if isinstance(content, list):
            return "".join(part["text"].strip() for part in content)
        return content.strip()

    pieces: Pieces = [("<bos>", False)]
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"] + "\n\n", messages[1:]
    for i, m in enumerate(messages):
        answer = m["role"] == "assistant"
        role = "model" if answer else m["role"]
        pieces.append((f"<turn>{role}\n{system if i == 0 else ''}", False))
        text = text_of(m)
        pieces.append((text + "</turn>", answer and bool(text)))
        pieces.append(("\n", False))
    return pieces


# --- bare role tokens, thoughts dropped, as in DeepSeek ------------------------------------------

ROLE_TOKENS = """\
{{- '<|begin|>' -}}
{%- for message in messages if message.role == 'system' -%}{{- message.content -}}{%- endfor -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- '<|User|>' + message.content -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|Assistant|>' -}}
        GEN_OPEN
        {%- if '</think>' in message.content -%}
            {{- message.content.split('</think>')[-1] -}}
        {%- else -%}
            {{- message.content -}}
        {%- endif -%}
        {{- '<|end|>' -}}
        GEN_CLOSE
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|><think>\\n' -}}{%- endif -%}
"""


def role_tokens_pieces(messages: Messages, tools: Sequence[Any] = ()) -> Pieces:
    pieces: Pieces = [("<|begin|>", False)]
    pieces += [(m.get("content") or "", False) for m in messages if m["role"] == "system"]
    for m in messages:
        text = m.get("content") or ""
        if m["role"] == "user":
            pieces.append((f"<|User|>{text}", False))
        elif m["role"] == "assistant":
            kept = text.split("</think>")[-1]
            pieces.append(("<|Assistant|>", False))
            on = bool(kept.strip())
            if kept.startswith("<think>\n"):
                # The generation prompt has it already.
                pieces.append(("<think>\n", False))
                kept = kept.removeprefix("<think>\n")
            pieces.append((f"{kept}<|end|>", on))
    return pieces


@dataclass(frozen=True)
class Family:
    """A template with its tokenizer's special tokens and its oracle."""

    name: str
    template: str
    special: tuple[str, ...]
    bos: str
    eos: str
    pieces: Callable[..., Pieces]
    roles: tuple[str, ...]
    alternates: bool

    def tokenizer(self, generation: bool = False) -> PreTrainedTokenizerFast:
        tags = ("{%- generation -%}", "{%- endgeneration -%}") if generation else ("", "")
        template = self.template.replace("GEN_OPEN", tags[0]).replace("GEN_CLOSE", tags[1])
        return build_tokenizer(
            template,
            ["<|pad|>", *self.special],
            bos_token=self.bos,
            eos_token=self.eos,
        )


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "chatml_tools", CHATML_TOOLS, ("<|im_start|>", "<|im_end|>"), "<|im_start|>",
            "<|im_end|>", chatml_tools_pieces, ("system", "user", "assistant", "tool"), False,
        ),
        Family(
            "headers", HEADERS, ("<|bos|>", "<|head|>", "<|/head|>", "<|eot|>"), "<|bos|>",
            "<|eot|>", headers_pieces, ("system", "user", "assistant", "tool"), False,
        ),
        Family(
            "brackets", BRACKETS, ("<s>", "</s>", "[INST]", "[/INST]"), "<s>", "</s>",
            brackets_pieces, ("system", "user", "assistant"), True,
        ),
        Family(
            # As with Gemma, the tokenizer's own end is not the turn's.
            "turns", TURNS, ("<bos>", "<eos>", "<turn>", "</turn>"), "<bos>", "<eos>",
            turns_pieces, ("system", "user", "assistant"), True,
        ),
        Family(
            "role_tokens", ROLE_TOKENS,
            ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>", "<think>", "</think>"),
            "<|begin|>", "<|end|>", role_tokens_pieces, ("system", "user", "assistant"), False,
        ),
    )
}  # fmt: skip
