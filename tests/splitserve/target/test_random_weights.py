"""Random targets: complete for SGLang and transformers, drawn the same again, made once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from sglang_testing import run_script

from splitserve.target import random_weights
from splitserve.target.byte_tokenizer import byte_tokenizer
from splitserve.target.cache import MARKER
from splitserve.target.info import kda_layers
from splitserve.target.prepare import prepare_target
from splitserve.target.random_weights import draw_apart, draw_weights, pieces, random_target
from splitserve.target.tensors import LOGIT_SPREAD, TensorSpec, checkpoint_tensors

ROOT = Path(__file__).parents[3]


def shipped(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json that a file of configs/target describes, with some fields changed."""
    text = (ROOT / "configs" / "target" / f"{name}.yaml").read_text()
    return {**yaml.safe_load(text)["random_config"], **changes}


SMALL_LING = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
}
CASES: dict[str, dict[str, Any]] = {
    "qwen3_tiny": shipped("qwen3_tiny"),
    "qwen3 tied": shipped("qwen3_tiny", tie_word_embeddings=True),
    "ling3_tiny": shipped("ling3_tiny"),
    "low-rank gates": shipped(
        "ling3_tiny",
        **SMALL_LING,
        no_kda_lora=False,
        layer_group_size=[0, 1, 1, 0, 1, 1],
        first_k_dense_replace=2,
        gated_attention_proj_granularity_type="element_wise",
        moe_shared_expert_intermediate_size=48,
    ),
    "no options": shipped(
        "ling3_tiny",
        **{**SMALL_LING, "q_lora_rank": None},
        layer_group_size=3,
        gated_attention_proj_granularity_type=None,
        num_shared_experts=0,
        moe_shared_expert_intermediate_size=None,
        moe_router_enable_expert_bias=False,
        score_function="softmax",
        router_dtype="bf16",
        n_group=0,
        topk_group=0,
    ),
}


# --- complete ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    """Draw on the CPU, wherever the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_weights.torch.cuda, "device_count", lambda: 0)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    cache = tmp_path_factory.mktemp("cache")
    return {name: random_target(config, 0, cache) for name, config in CASES.items()}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SGLang's own models made of the folders, by case."""
    pytest.importorskip("sglang")
    results = tmp_path_factory.mktemp("sglang") / "results.json"
    script = Path(__file__).with_name("sglang_load_process.py")
    run_script(script, results, *folders.values())
    found = json.loads(results.read_text())
    return {name: found[str(folder)] for name, folder in folders.items()}


@pytest.mark.parametrize("name", CASES)
def test_sglang_loads_every_tensor_into_every_parameter(
    name: str, loaded: dict[str, Any], folders: dict[str, Path]
) -> None:
    found = loaded[name]
    assert found["class"] == CASES[name]["architectures"][0]
    assert found["unset"] == []
    # Each number of the model was set, and the checkpoint holds just as many: it has none over.
    assert found["num_stored"] == found["num_parameters"] > 0
    stored = _read(folders[name])
    assert sum(t.numel() for t in stored.values()) == found["num_stored"]


@pytest.mark.parametrize("name", CASES)
def test_sglang_has_kda_in_the_same_layers(name: str, loaded: dict[str, Any]) -> None:
    assert tuple(loaded[name]["kda_layers"]) == kda_layers(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_float32_is_stored_where_sglang_keeps_it(
    name: str, loaded: dict[str, Any], folders: dict[str, Path]
) -> None:
    fused = {f"{part}_conv1d": "qkv_conv1d" for part in "qkv"}
    stored = set()
    for tensor, value in _read(folders[name]).items():
        assert value.dtype in (torch.float32, torch.bfloat16)
        if value.dtype == torch.float32:
            parts = tensor.split(".")
            stored.add(".".join(fused.get(part, part) for part in parts))
    assert stored == set(loaded[name]["float32"])


@pytest.mark.parametrize("name", ["qwen3_tiny", "qwen3 tied"])
@torch.no_grad()
def test_transformers_loads_it_and_prefers_some_tokens(name: str, folders: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folders[name], dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in report), report
    logits = model(torch.arange(200).view(2, 100)).logits
    assert logits.isfinite().all()
    spread = float(logits.std(-1).mean())
    assert LOGIT_SPREAD / 1.5 < spread < LOGIT_SPREAD * 1.5
    # Different contexts, different tokens.
    assert logits.argmax(-1).unique().numel() > 20


def test_the_folder_is_a_target_with_tokenizer_and_template(folders: dict[str, Path]) -> None:
    info = prepare_target(path=str(folders["ling3_tiny"]))
    assert info.architecture == "BailingMoeV3ForCausalLM"
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (6, 256, 1024)
    assert info.has_chat_template and info.dtype == "bfloat16"
    assert info.eos_token_ids == (258,) and info.tokenizer_len == 259


def test_the_sizes_of_the_large_one_are_those_of_qwen3_8b() -> None:
    tensors = checkpoint_tensors(shipped("qwen3_8b_random"))
    # As the model's page says: 8.2 billion, 6.95 of them outside the embedding and the lm_head.
    count = sum(math.prod(t.shape) for t in tensors)
    assert count == 8_190_735_360
    shards = random_weights._shards(tensors)
    assert [spec for shard in shards for spec in shard] == tensors
    sizes = [sum(spec.num_bytes for spec in shard) for shard in shards]
    assert max(sizes) <= random_weights.SHARD_BYTES and sum(sizes) == 2 * count


# --- drawn the same again ------------------------------------------------------------------------


def draw(spec: TensorSpec, seed: int) -> torch.Tensor:
    return torch.cat(list(pieces(spec, seed))).view(spec.shape)


def test_a_tensor_follows_from_seed_and_name() -> None:
    spec = TensorSpec("a", (40, 50), 0.5)
    first = draw(spec, 1)
    assert torch.equal(first, draw(spec, 1))
    assert not torch.equal(first, draw(spec, 2))
    assert not torch.equal(first, draw(TensorSpec("b", (40, 50), 0.5), 1))
    assert first.dtype == torch.bfloat16
    assert draw(TensorSpec("a", (1,), float32=True), 1).dtype == torch.float32
    assert abs(float(first.float().std()) - 0.5) < 0.03 and abs(float(first.float().mean())) < 0.03


def test_kda_gates_are_drawn_in_their_ranges() -> None:
    decay = draw(TensorSpec("A_log", (4000,), kind="log_decay", float32=True), 0).exp()
    assert 1.0 <= float(decay.min()) < 1.2 and 15.8 < float(decay.max()) <= 16.0
    bias = draw(TensorSpec("dt_bias", (4000,), kind="time_bias", float32=True), 0)
    step = torch.nn.functional.softplus(bias)
    assert 0.00099 < float(step.min()) < 0.0011 and 0.09 < float(step.max()) < 0.101


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec("a", (64, 64), 1.0)
    monkeypatch.setattr(random_weights, "_PIECE", 1000)
    assert [piece.numel() for piece in pieces(spec, 0)] == [1000, 1000, 1000, 1000, 96]
    drawn = draw(spec, 0).float().view(-1)
    # No piece repeats another.
    assert not torch.equal(drawn[:1000], drawn[1000:2000])
    assert abs(float(drawn.std()) - 1.0) < 0.05


def test_shards_hold_the_same_as_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CASES["qwen3_tiny"]
    for name, size in (("one", 2**31), ("many", 100_000)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        monkeypatch.setattr(random_weights, "SHARD_BYTES", size)
        draw_weights(folder, 3, "cpu")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 1
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 4
    one, many = _read(tmp_path / "one"), _read(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "many" / file)
    assert index["weight_map"].keys() == many.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in many.values())


def test_a_process_of_its_own_draws_the_same(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES["qwen3_tiny"]))
    draw_apart(tmp_path, 0, "cpu")
    here = _read(folders["qwen3_tiny"])
    there = _read(tmp_path)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)
    with pytest.raises(RuntimeError, match="nonsense"):
        draw_apart(tmp_path, 0, "nonsense")


# --- made once -----------------------------------------------------------------------------------


def test_it_is_made_once_per_config_and_seed(tmp_path: Path) -> None:
    config = CASES["qwen3_tiny"]
    first = random_target(config, 0, tmp_path)
    written = (first / "model-00001-of-00001.safetensors").stat().st_mtime_ns
    assert random_target(dict(config), 0, tmp_path) == first
    assert (first / "model-00001-of-00001.safetensors").stat().st_mtime_ns == written
    others = {
        random_target(config, 1, tmp_path),
        random_target({**config, "num_hidden_layers": 5}, 0, tmp_path),
        first,
    }
    assert len(others) == 3
    marker = json.loads((first / MARKER).read_text())
    assert marker["random_config"] == config and marker["made_with"]["drawn_on"] == "cpu"
    (first / "model-00001-of-00001.safetensors").write_bytes(b"cut")
    assert len(_read(random_target(config, 0, tmp_path))) > 1


def test_a_random_config_wins_over_a_package_and_a_path_over_both(tmp_path: Path) -> None:
    config = CASES["qwen3_tiny"]
    made = prepare_target(
        random_config=config, random_seed=7, package="p==1", cache_dir=tmp_path / "a"
    )
    assert Path(made.path) == random_target(config, 7, tmp_path / "a")
    given = prepare_target(
        path=made.path, random_config=CASES["ling3_tiny"], cache_dir=tmp_path / "b"
    )
    assert given == made and not (tmp_path / "b").exists()


def test_a_failure_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(random_weights, "_write_shard", fail)
    with pytest.raises(OSError, match="no space left"):
        random_target(CASES["qwen3_tiny"], 0, tmp_path)
    left = [p.name for p in (tmp_path / "targets").iterdir() if p.suffix != ".lock"]
    assert left == []


def test_a_full_disk_is_seen_before_drawing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = random_weights.shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(random_weights.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"1\.0 GB free; allowed: 16\.4 GB"):
        random_target(shipped("qwen3_8b_random"), 0, tmp_path)


# --- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("qwen3_tiny", {"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ("qwen3_tiny", {"hidden_size": None}, "hidden_size"),
        ("qwen3_tiny", {"head_dim": True}, "head_dim"),
        ("qwen3_tiny", {"intermediate_size": 0}, "intermediate_size"),
        ("qwen3_tiny", {"attention_bias": True}, "attention_bias"),
        ("qwen3_tiny", {"tie_word_embeddings": None}, "tie_word_embeddings"),
        ("qwen3_tiny", {"max_position_embeddings": None}, "max_position_embeddings"),
        ("qwen3_tiny", {"vocab_size": 259}, "vocab_size"),
        ("ling3_tiny", {"head_dim": 64}, "head_dim"),
        ("ling3_tiny", {"layer_group_size": 4}, "layer_group_size"),
        ("ling3_tiny", {"layer_group_size": [1, 0]}, "layer_group_size"),
        ("ling3_tiny", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ("ling3_tiny", {"no_kda_lora": None}, "no_kda_lora"),
        ("ling3_tiny", {"gated_attention_proj_granularity_type": "x"}, "gated_attention"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=rf"target\.random_config\.{field}.*allowed:"):
        random_target(shipped(name, **changes), 0, tmp_path)
    assert not (tmp_path / "targets").exists()


# --- the tokenizer -------------------------------------------------------------------------------


def test_every_text_comes_back_byte_by_byte() -> None:
    tokenizer = byte_tokenizer(100)
    text = "Two  words,\n\ttabs, 12 digits, \u00e4\u6f22 and \U0001f600."
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and max(ids) < 256
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|end|>") == [tokenizer.eos_token_id] == [258]
    # A random target writes ids that stand for no byte.
    assert tokenizer.decode([ids[0], 400]) == "T"


def test_the_template_marks_turns_and_asks_for_an_answer() -> None:
    tokenizer = byte_tokenizer(100)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole == "<|turn|>user\nHi<|end|>\n<|turn|>assistant\nYes<|end|>\n"
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<|turn|>user\nHi<|end|>\n<|turn|>assistant\n"
    assert whole.startswith(asked)


def _read(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors
