"""What the trainer needs to know about a target, read from its folder and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.config import language_config
from serving.contract import LAST_LAYER_CAPTURABLE
from splitserve.errors import UserError

# Source: SGLang 0.5.23, the models that define set_dspark_layers_to_capture.
_DSPARK_CAPTURE = frozenset(
    {
        "BailingMoeV3ForCausalLM",
        "DeepseekV4ForCausalLM",
        "KimiK3ForConditionalGeneration",
        "KimiLinearForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
    }
)


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """A target that has been found complete."""

    path: str
    """Its Hugging Face folder."""
    config: dict[str, Any] = field(repr=False)
    """The text model's config.json."""
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the embedding; possibly more than the tokenizer has tokens."""
    eos_token_ids: tuple[int, ...]
    """The tokens that end a response."""
    tokenizer_len: int
    """0 where the folder has no tokenizer and none was asked for."""
    has_chat_template: bool
    dtype: str


def capturable_layers(architecture: str, num_layers: int) -> range:
    """The decoder layers whose output the target engine can capture, by SGLang's layer ids."""
    last = num_layers if architecture in LAST_LAYER_CAPTURABLE else num_layers - 1
    return range(last)


def capture_convention(architecture: str) -> str:
    """The name under which SGLang captures this architecture's layers: "DSPARK" or "DFLASH"."""
    return "DSPARK" if architecture in _DSPARK_CAPTURE else "DFLASH"


def kda_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The decoder layers of a config.json that are Kimi delta attention, ascending.

    Source: SGLang 0.5.23, srt/configs/{bailing_hybrid,kimi_linear}.py.
    """
    depth = int(config.get("num_hidden_layers") or 0)
    kimi = config.get("linear_attn_config")
    if isinstance(kimi, Mapping):
        # Kimi counts its layers from 1.
        return tuple(sorted(layer - 1 for layer in kimi.get("kda_layers") or ()))
    if config.get("short_conv_kernel_size") is None:
        return ()
    groups = config.get("layer_group_size", 1)
    if isinstance(groups, list):
        return tuple(layer for layer, group in enumerate(groups[:depth]) if group == 1)
    return tuple(layer for layer in range(depth) if groups > 0 and (layer + 1) % groups)


def check_device(target: TargetInfo, device: str) -> None:
    """Refuse a target on a device that SGLang cannot run it on.

    Raises:
        ValueError: a target with KDA layers on the CPU.
    """
    layers = kda_layers(target.config)
    if layers and device == "cpu":
        raise UserError(
            "layout.device",
            device,
            f"cuda for {target.architecture}, {len(layers)} of whose {target.num_layers} layers "
            "are KDA layers: SGLang's kernels for these need a GPU",
            "take a layout and an engine for GPUs, such as layout=gpu1 engine=sglang_gpu, or here "
            "a target without such layers",
        )


def check_warm_start(target: TargetInfo, warm_start: bool) -> None:
    """Refuse to begin a draft from layers that are not of the draft's kind.

    Raises:
        ValueError: the target's layers are KDA or MLA, which have no q, k and v to take over.
    """
    latent = target.config.get("kv_lora_rank") is not None
    if warm_start and (latent or kda_layers(target.config)):
        raise UserError(
            "draft.warm_start",
            warm_start,
            f"false for {target.architecture}, whose attention (KDA, MLA) is not the draft's",
            "set draft.warm_start=false",
        )


def read_target(path: str | Path, *, need_tokenizer: bool = True) -> TargetInfo:
    """Describe the target in a Hugging Face folder.

    Raises ValueError, naming `target.path`, for the first thing that is missing.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise missing(folder, "is not a folder", "a local Hugging Face model folder")
    if not (folder / "config.json").is_file():
        raise missing(folder, "has no config.json", "a folder with config.json")
    raw = load_json(folder / "config.json")
    config = dict(language_config(raw))
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if not isinstance(config.get(key), int):
            raise missing(
                folder, f"has no integer {key} in its config.json", "a decoder language model"
            )
    if not any(folder.glob("*.safetensors")):
        raise missing(folder, "has no *.safetensors weights", "a folder with safetensors weights")
    tokenizer_len, template, tokenizer_eos = 0, False, None
    if need_tokenizer:
        tokenizer_len, template, tokenizer_eos = _read_tokenizer(folder)
        if tokenizer_len > config["vocab_size"]:
            raise missing(
                folder,
                f"has a tokenizer of {tokenizer_len} tokens for a vocabulary of "
                f"{config['vocab_size']}",
                "a tokenizer no larger than the model's vocabulary",
            )
    return TargetInfo(
        path=str(folder.resolve()),
        config=config,
        architecture=(raw.get("architectures") or [""])[0],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        eos_token_ids=_eos_token_ids(folder, config, tokenizer_eos),
        tokenizer_len=tokenizer_len,
        has_chat_template=template,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def context_window(config: Mapping[str, Any]) -> int | None:
    """Positions that a target was made for, from its config.json; None where that does not say.

    `max_position_embeddings` is the extended number where the config.json says what it was before,
    and SGLang multiplies it where it does not (0.5.23, get_context_length); the larger counts, so
    that nothing is refused that could run.
    """
    window = config.get("max_position_embeddings")
    if not isinstance(window, int) or window < 1:
        return None
    longest = window
    for rope in _rope_settings(config):
        factor = rope.get("factor")
        if not isinstance(factor, int | float) or factor <= 1:
            continue
        before = rope.get(
            "original_max_position_embeddings", config.get("original_max_position_embeddings")
        )
        longest = max(longest, int(factor * (before if isinstance(before, int) else window)))
    return longest


def _rope_settings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What scales a target's positions; some have it for each kind of layer."""
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, Mapping):
            found += [rope, *(r for r in rope.values() if isinstance(r, Mapping))]
    return found


def check_window(
    target: TargetInfo, field_name: str, value: int, num_tokens: int, remedy: str
) -> None:
    """Refuse sequences that are longer than what the target was made for.

    Args:
        field_name, value: the setting that makes them so long.
        num_tokens: of the longest.
        remedy: what else would help than another target.

    Raises:
        UserError: names both numbers.
    """
    window = context_window(target.config)
    if window is None or num_tokens <= window:
        return
    spare = window - (num_tokens - value)
    allowed = f"{spare} or less" if spare > 0 else "nothing with these prompts"
    raise UserError(
        field_name,
        value,
        f"{allowed}: {target.architecture or 'the target'} has {window} positions "
        f"(max_position_embeddings) and the longest sequence would have {num_tokens}",
        remedy,
    )


def missing(folder: Path, what: str, allowed: str) -> ValueError:
    """The error for a target's folder that is not complete: what it lacks, and what to do."""
    return ValueError(
        f"target.path={str(folder)!r} {what}; allowed: {allowed}; "
        "give the folder of a complete model (huggingface-cli download MODEL --local-dir FOLDER), "
        "or leave target.path empty and set target.package"
    )


def load_json(path: Path) -> dict[str, Any]:
    """The object in a file of a target's folder. Raises ValueError."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise missing(path.parent, f"has an unreadable {path.name} ({error})", "JSON") from error
    if not isinstance(loaded, dict):
        raise missing(path.parent, f"has a {path.name} that is not an object", "a JSON object")
    return loaded


def _read_tokenizer(folder: Path) -> tuple[int, bool, int | None]:
    if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        raise missing(folder, "has no tokenizer", "a folder with tokenizer.json")
    from transformers import AutoTokenizer

    try:
        # A config may name code of its own, and transformers would ask at the terminal for it.
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        why = " ".join(str(error).split())
        raise missing(
            folder,
            f"has a tokenizer that does not load ({type(error).__name__}: {why})",
            "a tokenizer that transformers.AutoTokenizer loads",
        ) from error
    return len(tokenizer), bool(tokenizer.chat_template), tokenizer.eos_token_id


def _eos_token_ids(
    folder: Path, config: dict[str, Any], tokenizer_eos: int | None
) -> tuple[int, ...]:
    """Every id by which the model's own generation stops, and the tokenizer's end of turn."""
    found: list[int] = []
    sources = [config.get("eos_token_id"), tokenizer_eos]
    if (folder / "generation_config.json").is_file():
        sources.insert(0, load_json(folder / "generation_config.json").get("eos_token_id"))
    for value in sources:
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and token not in found:
                found.append(token)
    return tuple(found)
