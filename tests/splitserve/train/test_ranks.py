"""Two ranks through DeepSpeed, in bfloat16 as runs are."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ranks import DRAFT, compare
from dspark.initial import initial_draft


def test_gradients_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    found = compare("cpu", tmp_path)
    assert found["gradient_parameters"] == len(list(initial_draft(DRAFT, 0).parameters()))
    assert found["gradient_norm_1_rank"] > 0.1
    assert found["gradient_norm_2_ranks"] == pytest.approx(found["gradient_norm_1_rank"], rel=1e-5)
    assert found["gradient_largest_relative_error"] < 1e-5
