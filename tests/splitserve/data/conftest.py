"""Fixtures of the data tests."""

from __future__ import annotations

import pytest
from chat_tokenizer import TokenizerMaker, build_tokenizer
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def make_tokenizer() -> TokenizerMaker:
    return build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()
