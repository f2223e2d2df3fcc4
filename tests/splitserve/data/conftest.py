"""Fixtures of the data tests."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from tests.splitserve.data.chat_tokenizer import TokenizerMaker, build_tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> TokenizerMaker:
    return build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()
