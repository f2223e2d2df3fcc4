"""Run as a process: the ids that SGLang's chat endpoint makes of messages, without a server.

Reads a JSON list of {"tokenizer": folder, "request": {...}}, writes a JSON list of ids or, for a
request that the endpoint refuses, null. The endpoint's own `_apply_jinja_template` does the work,
on an instance that has only what that method reads.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.parser.jinja_template_utils import (
    detect_jinja_template_content_format,
    jinja_template_may_reorder_tool_results,
)
from transformers import AutoTokenizer


def endpoint(folder: str) -> OpenAIServingChat:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    serving = object.__new__(OpenAIServingChat)
    serving.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer)
    template = tokenizer.chat_template
    serving.template_manager = SimpleNamespace(
        jinja_template_content_format=detect_jinja_template_content_format(template),
        jinja_template_may_reorder_tool_results=jinja_template_may_reorder_tool_results(template),
        python_chat_template=None,
        reasoning_config=None,
    )
    serving._encoding_adapter = None
    serving.chat_encoding_spec = None
    serving.is_minimax_m3 = False
    serving._tokenizer_auto_adds_specials = True
    serving._prompt_text_round_trip_is_lossy = False
    return serving


def main() -> None:
    answers = []
    for case in json.load(sys.stdin):
        request = ChatCompletionRequest(model="m", **case["request"])
        tools = [tool.model_dump() for tool in request.tools] if request.tools else None
        try:
            made = endpoint(case["tokenizer"])._apply_jinja_template(request, tools, False)
        except ValueError:
            answers.append(None)
        else:
            answers.append(list(made.prompt_ids))
    print(json.dumps(answers))


main()
