"""A target named as on the Hugging Face hub, where the machine has it or can reach the hub."""

from __future__ import annotations

import re
from pathlib import Path

from splitserve.errors import UserError

HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def local_folder(path: str) -> Path:
    """`path` itself where it is a folder or no hub name, else the folder of that hub model.

    A model that was downloaded before is taken as it lies in the hub's cache; else it is downloaded
    there, all its weights included.

    Raises:
        ValueError: neither a folder nor in the cache, and the hub gives nothing.
    """
    folder = Path(path).expanduser()
    if folder.exists() or not HUB_NAME.fullmatch(path):
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=list(_FILES)))
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        raise UserError(
            "target.path",
            path,
            "the folder of a model, or a hub name that this machine can download",
            f"download it where there is a network (hf download {path} --local-dir FOLDER) and set "
            f"target.path=FOLDER. The hub said: {type(error).__name__}: {why}",
        ) from error
