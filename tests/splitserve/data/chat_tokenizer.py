"""A tokenizer made on the spot: byte-level BPE over a few lines, with a ChatML template."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<unused_a>", "<unused_b>"]

CHATML = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TEXT = [
    "system\nuser\nassistant\nBe brief.\n\nYou are kind.\n\n\nOne more line.\n\n",
    "What is two plus two? It is four, and that is all there is to say about it.\n",
]

TokenizerMaker = Callable[..., PreTrainedTokenizerFast]


def build_tokenizer(
    template: str | None = CHATML, special: list[str] = SPECIAL, **kwargs: str
) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in special],
    )
    core.train_from_iterator(TEXT * 20, trainer)
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=template, **{**named, **kwargs}
    )
