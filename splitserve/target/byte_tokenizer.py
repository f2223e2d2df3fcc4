"""A tokenizer for targets of random weights: one token a byte, and a chat template."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, BEGIN_TURN, END_TURN = "<|pad|>", "<|turn|>", "<|end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)


def byte_tokenizer(model_max_length: int) -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes; the three after them pad, begin and end a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in (PAD, BEGIN_TURN, END_TURN)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=TEMPLATE,
        pad_token=PAD,
        eos_token=END_TURN,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )
