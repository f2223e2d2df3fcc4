"""The command that serves a target with its draft."""

from __future__ import annotations

import json
from pathlib import Path

from serving.contract import contract_problems


def launch_command(draft_path: str, target_path: str, *, tp_size: int = 1) -> list[str]:
    """SGLang's launch line for an exported draft, one argument an item.

    Args:
        draft_path: the export folder.
        target_path: the target's folder or hub name.
        tp_size: GPUs that the target is split over.

    Raises:
        ValueError: the draft's config.json does not meet SGLang's contract for that target.
    """
    draft = json.loads((Path(draft_path) / "config.json").read_text())
    target_config = Path(target_path) / "config.json"
    if target_config.is_file():
        problems = contract_problems(draft, json.loads(target_config.read_text()))
        if problems:
            raise ValueError(
                f"draft {draft_path}: SGLang cannot serve it: {'; '.join(problems)}; "
                "train it again with these settings corrected"
            )
    return [
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        target_path,
        "--speculative-algorithm",
        "DSPARK",
        "--speculative-draft-model-path",
        draft_path,
        "--tp-size",
        str(tp_size),
    ]
