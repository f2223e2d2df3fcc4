"""The command that serves a target with its draft."""

from __future__ import annotations

from serving.profiles import Profile, Request, build_launch


def launch_command(draft_path: str, target_path: str, *, tp_size: int = 1) -> list[str]:
    """SGLang's launch line for an exported draft, one argument an item.

    Where it will run is not known, so backends are left to SGLang; `splitserve serve` chooses them
    for the machine that it is on.

    Args:
        draft_path: the export folder.
        target_path: the target's folder or hub name.
        tp_size: GPUs that the target is split over.

    Raises:
        ValueError: the draft does not meet SGLang's contract for that target.
    """
    request = Request(Profile.DSPARK_STATIC, target_path, draft_path, tp_size=tp_size)
    return build_launch(request).command()
