"""The command line answers bad input with one line, and help without loading anything heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from splitserve import __version__, cli
from splitserve.errors import RunFailed

RECIPE = "recipe=smollm2_dspark"
ROW = '{"id": "a", "domain": "math", "messages": [{"role": "user", "content": "1+1?"}]}'


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "splitserve.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # `main` installs a handler of its own for SIGTERM.
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    yield
    signal.signal(signal.SIGTERM, handler)


def refused(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str], code: int = 2, *contains: str
) -> str:
    """The one line on stderr of a command that is refused."""
    assert cli.main(arguments) == code
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("splitserve: ")
    for text in contains:
        assert text in lines[0]
    return lines[0]


# --- as a process --------------------------------------------------------------------------------


def test_help_is_quick(tmp_path: Path) -> None:
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        result = run("--help", cwd=tmp_path)
        seconds.append(time.monotonic() - start)
        assert result.returncode == 0
        assert result.stderr == ""
    for command in ("train", "eval", "export", "config"):
        assert f"\n  {command}" in result.stdout
    assert min(seconds) < 1.5


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["trian"], ["eval", "--help"]])
def test_nothing_heavy_is_imported_to_answer(tmp_path: Path, arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from splitserve import cli\n"
        f"cli.main({arguments!r})\n"
        "heavy = {'torch', 'hydra', 'transformers', 'deepspeed', 'sglang'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_process_takes_the_exit_code(tmp_path: Path) -> None:
    assert run("--version", cwd=tmp_path).stdout == f"splitserve {__version__}\n"
    assert run(cwd=tmp_path).returncode == 2
    result = run("trian", cwd=tmp_path)
    assert result.returncode == 2
    assert "did you mean 'train'?" in result.stderr
    assert "Traceback" not in result.stderr


# --- in this process -----------------------------------------------------------------------------


def test_train_help_lists_recipes_groups_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for line in ("  smollm2_dspark", "  layout: cpu, gpu1, gpu1p1, gpu4p4", "  train.steps"):
        assert line in text.splitlines()


def test_config_prints_what_a_run_would_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", RECIPE, "train.steps=3"]) == 0
    assert "  steps: 3\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "contains"),
    [
        (["trian"], "did you mean 'train'?"),
        (["train"], "recipe"),
        (["train", "recipe=smolm2_dspark"], "did you mean 'smollm2_dspark'?"),
        (["train", RECIPE, "train.stepz=1"], "did you mean 'train.steps'?"),
        (["train", RECIPE, "train.steps=many"], "train.steps='many'"),
        (["train", RECIPE, "train.steps"], "key=value"),
        (["train", RECIPE, "resume=true"], "run_dir"),
        (["train", RECIPE, "resume=true", "run_dir=nowhere"], "run_dir='nowhere'"),
        (["config", RECIPE, "layout.device=tpu"], "layout.device='tpu'"),
        (["eval"], "run"),
        (["eval", "run=nowhere"], "run='nowhere'"),
        (["eval", "temprature=1"], "did you mean 'temperature'?"),
        (["eval", "temperature=hot"], "Float"),
        (["eval", "temperature=-1"], "temperature=-1.0"),
        (["eval", "temperature=inf"], "temperature=inf"),
        (["eval", "temperature=1", "lossless=true"], "lossless=true"),
        (["eval", "num_prompts=-1"], "num_prompts=-1"),
        (["eval", "max_new_tokens=-1"], "max_new_tokens=-1"),
        (["eval", "run=somewhere", "target=other"], "leave target out"),
        (["eval", "draft=somewhere", "run=somewhere", "prompts=mine"], "leave prompts out"),
        (["eval", "prompts=mine.jsonl"], "leave prompts out"),
        (["eval", "draft=somewhere"], "target"),
        (["eval", "draft=somewhere", "target=nowhere", "prompts=none.jsonl"], "nowhere"),
        (["export"], "run"),
        (["export", "run=nowhere"], "run='nowhere'"),
        (["export", "checkpoints=best"], "did you mean 'checkpoint'?"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], contains: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(arguments, capsys, 2, contains)


@pytest.mark.parametrize(
    ("text", "contains"),
    [
        ("", "prompts"),
        (f'{ROW}\n{{"id": \n', "line 2"),
    ],
)
def test_bad_prompts_are_one_line(
    text: str, contains: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.jsonl").write_text(text)
    line = refused(
        ["train", RECIPE, "engine=transformers", "data.prompts=mine.jsonl"], capsys, 2, contains
    )
    assert "mine.jsonl" in line


def test_missing_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", RECIPE, "engine=transformers"]
    refused([*arguments, "run_dir=a", "data.prompts=none.jsonl"], capsys, 2, "none.jsonl")
    refused([*arguments, "run_dir=b", "target=local", "target.path=none"], capsys, 2, "none")
    (tmp_path / "hollow").mkdir()
    refused([*arguments, "run_dir=c", "target=local", "target.path=hollow"], capsys, 2, "hollow")


def test_a_run_that_is_refused_can_be_started_again_in_its_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["train", RECIPE, "engine=transformers", "run_dir=mine", "data.prompts=none.jsonl"]
    for _ in range(2):
        refused(arguments, capsys, 2, "none.jsonl")


def test_a_run_that_is_refused_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", RECIPE, "engine=transformers", "data.prompts=none.jsonl"]
    refused(arguments, capsys, 2, "none.jsonl")
    refused([*arguments, "run_dir=a/b"], capsys, 2, "none.jsonl")
    assert list(tmp_path.iterdir()) == []
    notes = tmp_path / "mine" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("keep")
    refused([*arguments, "run_dir=mine"], capsys, 2, "none.jsonl")
    assert [p.name for p in notes.parent.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RunFailed("the engine died"), 1, "splitserve: the engine died\n"),
        (KeyboardInterrupt(), 130, "splitserve: stopped\n"),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: Sequence[str]) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "train", fail)
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err == text


def _library_error(arguments: Sequence[str]) -> int:
    return int("no number")


def _our_mistake(arguments: Sequence[str]) -> int:
    # Code of ours that no check of ours stands in.
    names = {"__name__": "splitserve.run.main"}
    exec("def fail(): return int('no number')", names)
    return names["fail"]()  # type: ignore[operator]


def _our_check(arguments: Sequence[str]) -> int:
    names = {"__name__": "dspark.config"}
    exec("def fail():\n raise ValueError(\n 'block_size=0 is not usable'\n )", names)
    return names["fail"]()  # type: ignore[operator]


def _no_value_error(arguments: Sequence[str]) -> int:
    raise KeyError("no such key")


BUGS = pytest.mark.parametrize("fail", [_library_error, _our_mistake, _no_value_error])


@BUGS
def test_an_unexpected_error_outside_a_run_keeps_its_traceback(
    fail: Callable[[Sequence[str]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "train", fail)
    assert cli.main(["train"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("Traceback")
    assert text.splitlines()[-1].startswith("splitserve: unexpected ")


@BUGS
@pytest.mark.parametrize("named", [True, False])
def test_an_unexpected_error_of_a_run_leaves_its_traceback_in_the_runs_log(
    fail: Callable[[Sequence[str]], int],
    named: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def begin(arguments: Sequence[str]) -> int:
        Path("runs/mine/1/logs").mkdir(parents=True)
        return fail(arguments)

    monkeypatch.setitem(cli.COMMANDS, "train", begin)
    line = refused(["train", *["run_dir=runs/mine/1"] * named], capsys, 1, "unexpected")
    log = Path("runs/mine/1/logs/splitserve.log")
    assert line.endswith(f"traceback: {log}")
    assert log.read_text().startswith("Traceback")


def test_another_runs_log_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = Path("runs/mine/0")
    (old / "logs").mkdir(parents=True)
    os.utime(old, (1.0, 1.0))
    monkeypatch.setitem(cli.COMMANDS, "train", _no_value_error)
    assert cli.main(["train"]) == 1
    assert list((old / "logs").iterdir()) == []


def test_a_check_below_the_command_line_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "train", _our_check)
    refused(["train"], capsys, 2, "block_size=0 is not usable")
