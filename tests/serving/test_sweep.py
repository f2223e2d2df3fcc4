"""Break-even, and files that SGLang's own loaders take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_launch import sglang_folder

from serving.sweep import (
    Point,
    best_point,
    fit_sts,
    growths,
    sps_table,
    sweep_to_dict,
    write_sps,
)

POINTS = [Point(3, 2.4, 6.3), Point(0, 1.0, 5.0), Point(1, 1.7, 6.0), Point(7, 2.5, 7.5)]


def test_longer_drafts_pay_while_accept_grows_faster_than_the_step() -> None:
    found = growths(POINTS)
    assert [(g.start.num_drafts, g.end.num_drafts, g.pays) for g in found] == [
        (0, 1, True),
        (1, 3, True),
        (3, 7, False),
    ]
    assert found[0].rule() == "0 -> 1 drafts: accept +70.0 % > step +20.0 %: pays"
    assert "accept +4.2 % <= step +19.0 %: does not pay" in found[2].rule()
    # Paying is the same as a cheaper token.
    assert all(g.pays == (g.end.tpot_ms < g.start.tpot_ms) for g in found)
    assert best_point(POINTS).num_drafts == 3
    assert sweep_to_dict(POINTS)["best_num_drafts"] == 3


def test_the_table_of_steps_per_second() -> None:
    table = sps_table({4: 8.0, 1: 5.0}, 8)
    assert table == {
        "sample_batch_tokens": [8, 32],
        "sample_steps_per_sec": [200.0, 125.0],
        "max_batch_tokens": 32,
    }
    for wrong in ({1: 5.0}, {1: 0.0, 2: 5.0}):
        with pytest.raises(ValueError, match="two or more sizes"):
            sps_table(wrong, 8)


@pytest.fixture(scope="module")
def sglang() -> Any:
    sglang_folder()
    return pytest.importorskip("sglang.srt.speculative.dspark_components.dspark_sps")


def test_sglang_loads_the_table(sglang: Any, tmp_path: Path) -> None:
    file = tmp_path / "sps.json"
    write_sps(file, sps_table({1: 5.0, 2: 6.0, 8: 9.0}, 8))
    table = sglang.load_sps_table_from_path(str(file))
    assert not sglang.is_uninitialized_sps_table(table)
    assert table.lookup(8) == pytest.approx(200.0)
    assert table.lookup(40) == pytest.approx(1e3 / 6.0)


def test_temperatures_are_fitted_and_loaded_by_sglang(sglang: Any, tmp_path: Path) -> None:
    from sglang.srt.speculative.dspark_components.dspark_sts import (
        StsDataRecorder,
        load_sts_calibration_from_path,
    )

    stem, out = tmp_path / "shard", tmp_path / "sts.json"
    with pytest.raises(ValueError, match="has no shards"):
        fit_sts(stem, out, 3)
    # What a server writes: confidences twice as sharp as what comes true.
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(4000, 3, generator=generator) * 4 - 2
    hits = torch.rand(4000, 3, generator=generator) < torch.sigmoid(truth)
    correct = hits.long().cumprod(1).sum(1)
    recorder = StsDataRecorder(path_stem=str(stem), gamma=3, flush_every=4000)
    for row in range(4000):
        recorder.record(
            confidence_raw=2 * truth[row : row + 1], num_correct_drafts=correct[row : row + 1]
        )
    temperatures = fit_sts(stem, out, 3)
    assert temperatures[0] == pytest.approx(2.0, rel=0.25)
    assert load_sts_calibration_from_path(str(out)).temperatures == temperatures
    assert len(json.loads(out.read_text())["ece_after"]) == 3
    with pytest.raises(RuntimeError, match="failed"):
        fit_sts(stem, out, 4)
