"""A layer of kernels of our own, as the benchmark chains them, with norms inside and apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_testing import DEVICE

pytest.importorskip("triton", reason="triton has no build for this platform")

ROOT = Path(__file__).parents[2]


def test_a_chained_layer_is_the_same_with_norms_inside_and_choices_are_taken(
    tmp_path: Path,
) -> None:
    choices = tmp_path / "choices.jsonl"
    plain = {"num_out": 64, "num_in": 48, "rows": 8, "dtype": "bfloat16", "bias": False}
    choices.write_text(json.dumps({**plain, "choice": "m8n32k32s3w4p1"}) + "\n")
    # The script ends with an error where the two differ.
    subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.decode_layer", "--model", "tiny"),
            *("--device", DEVICE.type, "--depth", "2", "--context", "40", "--rows", "3"),
            *("--seconds", "0", "--replays", "1", "--choices", choices, "--out", tmp_path),
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1" if DEVICE.type == "cpu" else "0"},
        check=True,
        timeout=300,
        capture_output=True,
    )
    figures = json.loads((tmp_path / "decode_layer_tiny.json").read_text())["figures"]
    assert figures["down_config"] == "m8n32k32s3w4p1"
    assert figures["failed"] == 0
    assert 0 < figures["layer_us"] <= figures["first_layer_us"]
    kept = [json.loads(line) for line in choices.read_text().splitlines()]
    assert sorted(line.get("norm", "") for line in kept) == [
        "",
        "before",
        "before",
        "behind",
        "behind",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--choices nowhere/choices.jsonl", "a file in a folder that exists"),
        ("--choices README.md", "is no file of choices"),
        ("--choices zeros.jsonl", "names no product"),
        ("--share 2 2", "a number below the second one"),
        ("--rows 99", "allowed: up to 16"),
        ("--timeline", "allowed with --device cuda"),
        ("--device cuda", "there is no GPU here"),
    ],
)
def test_bad_options_are_one_line(
    given: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from benchmarks import decode_layer

    shape = {"num_out": 64, "num_in": 48, "rows": 8, "dtype": "bfloat16", "bias": False}
    (tmp_path / "zeros.jsonl").write_text(json.dumps({**shape, "choice": "m8n32k0s3w4p1"}))
    (tmp_path / "README.md").write_text("# A readme")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(decode_layer.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        decode_layer.main(["--model", "tiny", "--device", "cpu", *given.split()])
    assert message in capsys.readouterr().err.splitlines()[-1]
