"""The export: a Hugging Face folder that SGLang's DSPARK loads, written whole and verified.

SGLang does not notice a missing backbone tensor and ignores unknown names, so the exporter checks
both itself.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dspark.config import DraftConfig
from dspark.model import DSparkDraft

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
FLOAT32_PREFIX = "confidence_head."
"""The confidence head is served in float32; everything else in bfloat16."""


def expected_tensors(config: DraftConfig) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name, shape and type of every tensor of an export, and of no other.

    Source: SGLang 0.5.23, srt/models/dspark.py, `load_weights`.
    """
    with torch.device("meta"):
        draft = DSparkDraft(config)
    return {
        name: (tuple(p.shape), torch.float32 if name.startswith(FLOAT32_PREFIX) else torch.bfloat16)
        for name, p in draft.state_dict().items()
    }


def save_draft(folder: str | Path, config: DraftConfig, state: Mapping[str, torch.Tensor]) -> None:
    """Write config.json and the weights; the folder appears whole or not at all.

    Args:
        state: every parameter by name, in any type.

    Raises:
        ValueError: a tensor is missing, extra or of another shape.
        OSError: the disk is full or not writable; an earlier folder of that name is untouched.
    """
    final = Path(folder)
    partial = final.with_name(f".{final.name}.partial")
    replaced = final.with_name(f".{final.name}.replaced")
    expected = expected_tensors(config)
    _compare(
        {name: (tuple(t.shape), expected.get(name, ((), t.dtype))[1]) for name, t in state.items()},
        expected,
        final,
    )
    tensors = {
        name: state[name].detach().to(device="cpu", dtype=dtype).contiguous()
        for name, (_, dtype) in expected.items()
    }
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(tensors, partial / WEIGHTS_NAME, metadata={"format": "pt"})
        text = json.dumps(config.to_hf(), indent=2, sort_keys=True) + "\n"
        (partial / CONFIG_NAME).write_text(text)
        # safetensors lets nobody else read its file; whoever may read the one may read the other.
        (partial / WEIGHTS_NAME).chmod((partial / CONFIG_NAME).stat().st_mode & 0o777)
        for name in (WEIGHTS_NAME, CONFIG_NAME):
            _sync(partial / name)
        _sync(partial)
        if final.exists():
            # Moved aside and not removed first, so that the name is absent for an instant only.
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        os.rename(partial, final)
        _sync(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"draft {final} could not be written: {error}") from error


def _sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_config(folder: str | Path) -> DraftConfig:
    """The geometry of a draft folder.

    Raises:
        ValueError: config.json is missing, not JSON or not complete.
    """
    path = Path(folder) / CONFIG_NAME
    try:
        return DraftConfig.from_hf(json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"draft {folder}: {CONFIG_NAME} cannot be read ({error}); name a folder that "
            "splitserve export wrote"
        ) from error


def verify_export(folder: str | Path, *, servable: bool = False) -> DraftConfig:
    """Check that every expected tensor is there with its shape and type, and nothing more.

    Args:
        servable: also ask that SGLang's DSPARK can serve the draft.

    Raises:
        ValueError: names what is missing, extra or different, or what cannot be served.
    """
    config = read_config(folder)
    if servable and not config.servable:
        raise ValueError(
            f"draft {folder}: markov_rank=0 cannot be served by SGLang's DSPARK; allowed: 1 or "
            "more; train a draft with a Markov head"
        )
    path = Path(folder) / WEIGHTS_NAME
    types = {"F32": torch.float32, "BF16": torch.bfloat16}
    try:
        with safe_open(path, framework="pt") as tensors:
            found = {}
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                part = tensors.get_slice(name)
                found[name] = (tuple(part.get_shape()), types.get(part.get_dtype(), torch.int8))
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"draft {folder}: {WEIGHTS_NAME} cannot be read ({error}); export it again"
        ) from error
    _compare(found, expected_tensors(config), Path(folder))
    return config


def _compare(
    found: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    folder: Path,
) -> None:
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    wrong = [
        f"{name} is {found[name]}, not {expected[name]}"
        for name in sorted(found.keys() & expected.keys())
        if found[name] != expected[name]
    ]
    problems = [f"missing {name}" for name in missing] + [f"unknown {name}" for name in extra]
    if problems or wrong:
        raise ValueError(
            f"draft {folder}: the weights do not fit its config: "
            f"{'; '.join([*problems, *wrong][:6])}; export it again from its checkpoint"
        )


def load_draft(
    folder: str | Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> DSparkDraft:
    """A verified draft in eval mode; the confidence head stays in float32.

    Raises:
        ValueError: the folder is not a complete export.
    """
    config = verify_export(folder)
    draft = DSparkDraft(config)
    with safe_open(Path(folder) / WEIGHTS_NAME, framework="pt") as tensors:
        draft.load_state_dict({name: tensors.get_tensor(name) for name in tensors.keys()})  # noqa: SIM118
    draft = draft.to(device=device, dtype=dtype).eval().requires_grad_(False)
    with safe_open(Path(folder) / WEIGHTS_NAME, framework="pt") as tensors:
        for name, parameter in draft.named_parameters():
            if name.startswith(FLOAT32_PREFIX):
                parameter.data = tensors.get_tensor(name).to(device)
    return draft
