"""What a decode profile depends on: the target, the draft and the GPUs, read and not guessed."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from dspark.config import language_config


class Family(Enum):
    """Targets that want the same settings."""

    DENSE = "dense"
    """Grouped-query attention and dense feed-forward layers: Qwen3, Llama and their like."""
    LING3 = "bailing_moe_v3"
    """Ling-3: Kimi delta attention, multi-head latent attention, mixture of experts."""
    OTHER = "other"


class Gpu(Enum):
    """GPU generations that differ in the kernels that SGLang has for them."""

    AMPERE = "ampere"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"
    """Data-centre Blackwell, compute capability 10.x."""
    CPU = "cpu"
    OTHER = "other"
    """Unknown or without kernels of its own (12.x for one): backends are left to SGLang."""


_DENSE_ARCHITECTURES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_LING3_ARCHITECTURES = frozenset({"BailingMoeV3ForCausalLM"})
_GENERATIONS = {8: Gpu.AMPERE, 9: Gpu.HOPPER, 10: Gpu.BLACKWELL}


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a target's config.json says; nothing but its path for a name on a hub."""

    path: str
    config: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's config, see `language_config`; empty if that is unknown."""
        return language_config(self.config or {})

    @property
    def architecture(self) -> str:
        """First of `architectures`; empty if unknown."""
        return str(((self.config or {}).get("architectures") or [""])[0])

    @property
    def family(self) -> Family:
        """By the architecture."""
        if self.architecture in _LING3_ARCHITECTURES:
            return Family.LING3
        return Family.DENSE if self.architecture in _DENSE_ARCHITECTURES else Family.OTHER

    @property
    def num_mtp_layers(self) -> int | None:
        """Layers for multi-token prediction, which NEXTN drafts with; None if unknown."""
        if self.config is None:
            return None
        return int(self.text.get("num_nextn_predict_layers") or 0)

    @property
    def fp8_block(self) -> int:
        """Rows of a block of fp8 weights that share a scale; 0 for any other weights."""
        quantization = (self.config or {}).get("quantization_config") or {}
        block = quantization.get("weight_block_size") or [0]
        return int(block[0]) if quantization.get("quant_method") == "fp8" else 0


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """What a draft folder holds."""

    path: str
    config: Mapping[str, Any] = field(repr=False)
    tensors: frozenset[str] = field(repr=False)
    """Names of its weights."""

    @property
    def block_size(self) -> int:
        """Drafts per round that it was trained for; 0 if the config.json does not say."""
        value = self.config.get("block_size")
        return value if isinstance(value, int) else 0

    @property
    def has_confidence_head(self) -> bool:
        """Both tensors that SGLang asks for outside of static verification."""
        return {"confidence_head.proj.weight", "confidence_head.proj.bias"} <= self.tensors


def read_target(path: str) -> TargetFacts:
    """The facts of a target folder, or of a hub name as far as this machine has it already.

    Nothing is fetched. Without a config.json the facts are the name alone.

    Raises:
        ValueError: the config.json is not JSON.
    """
    file: Path | None = Path(path) / "config.json"
    if not Path(path).is_dir():
        file = _cached_config(path)
    return TargetFacts(path, _read_json(file, "target") if file and file.is_file() else None)


def _cached_config(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def read_draft(path: str) -> DraftFacts:
    """The facts of a draft folder.

    Raises:
        ValueError: there is no config.json, or a file cannot be read.
    """
    folder = Path(path)
    config = _read_json(folder / "config.json", "draft")
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        names |= tensor_names(file)
    return DraftFacts(path, config, frozenset(names))


def tensor_names(file: Path) -> set[str]:
    """Names in the weights of a draft, from the file's header alone.

    Raises:
        ValueError: the file is cut off or not in that format.
    """
    try:
        return weight_names(file)
    except ValueError as error:
        raise ValueError(
            f"draft weights {file} cannot be read ({error}); allowed: a whole safetensors file; "
            "export the draft again"
        ) from error


def weight_names(file: Path) -> set[str]:
    """Names in a safetensors file that is all there, from its header and its length.

    Raises:
        ValueError: it is cut off, not in that format, or cannot be read; says which.
    """
    return set(weight_entries(file))


def weight_entries(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names in a safetensors file that is all there, with the type and shape that it says.

    Raises:
        ValueError: it is cut off, not in that format, or cannot be read; says which.
    """
    try:
        with open(file, "rb") as stream:
            start = stream.read(8)
            if start == b"version ":
                raise ValueError("a pointer of Git LFS in the file's place: run git lfs pull")
            (size,) = struct.unpack("<Q", start)
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        found = {
            name: (str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in header.items()
        }
        length = file.stat().st_size
    except (OSError, struct.error, MemoryError, OverflowError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"its header does not list tensors ({error!r})") from error
    wanted = 8 + size + max(ends, default=0)
    if length < wanted:
        raise ValueError(f"cut off: it has {length} of {wanted} bytes")
    return found


def _read_json(file: Path, what: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{what}={str(file.parent)!r} is not usable: config.json cannot be read ({error}); "
            "allowed: a Hugging Face model folder; name one"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{what}={str(file.parent)!r} is not usable: config.json holds a "
            f"{type(found).__name__}; allowed: an object; name a model folder"
        )
    return found


def gpu_of_capability(capability: str) -> Gpu:
    """The generation of a compute capability such as "9.0"."""
    major = capability.partition(".")[0].strip()
    return _GENERATIONS.get(int(major), Gpu.OTHER) if major.isdigit() else Gpu.OTHER


_QUERIES = (
    ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"),
    (
        sys.executable,
        "-c",
        "import torch\n"
        "for i in range(torch.cuda.device_count()):\n"
        "    print('%d.%d' % torch.cuda.get_device_capability(i))",
    ),
)


def detect_gpu() -> tuple[Gpu, int]:
    """Generation and number of the GPUs of this machine; (CPU, 0) without any.

    Asks the driver's own tool, or torch where that is missing, in a process of its own: this one
    opens no GPU.
    """
    for query in _QUERIES:
        try:
            result = subprocess.run(query, capture_output=True, text=True, timeout=90, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        lines = [line for line in result.stdout.splitlines() if line.strip()]
        if result.returncode == 0 and lines:
            return gpu_of_capability(lines[0]), len(lines)
    return Gpu.CPU, 0
