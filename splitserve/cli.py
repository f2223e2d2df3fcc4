"""The command line: `splitserve train|eval|export|plan|config|data|serve|... key=value ...`.

Heavy imports happen inside the commands, so that `--help` and a mistyped setting answer at once.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dis import opmap
from pathlib import Path

from splitserve import __version__
from splitserve.errors import RunFailed, UserError, suggest

USAGE = """\
usage: splitserve COMMAND [key=value ...]

  train   recipe=NAME [setting=value ...] [resume=true] [run_dir=FOLDER]
          train a draft for a target, measure it in the loop, export the best one
  eval    [run=FOLDER | draft=FOLDER target=FOLDER prompts=FILE] [temperature=0]
          [num_prompts=N] [lossless=true]
          measure a draft's accept length on held-out prompts
  export  [run=FOLDER] [checkpoint=best|last|STEP] [out=FOLDER]
          write a draft as the folder that SGLang loads
  plan    recipe=NAME [setting=value ...]
          show the halves of a run and the memory that each GPU will need, and start nothing
  config  recipe=NAME [setting=value ...]
          print the resolved settings
  data    preview|stats|generate target=FOLDER data=SOURCE [option=value ...]
          show what is supervised, measure the data, have the target answer prompts

  serve   profile=plain|nextn|dspark_static|dspark_compact target=FOLDER [draft=FOLDER]
          [dry_run=true]
          start SGLang with the settings of a decode profile, or print the launch line
  bench   [url=ADDRESS | profile=... target=FOLDER] [against.OPTION=VALUE] [prompts=FILE]
          measure a server, or two in turn
  gate    [URL URL | profile=... against.OPTION=VALUE] target=FOLDER prompts=FILE
          judge a change by what it generates
  audit   [url=ADDRESS | profile=...] target=FOLDER
          say which optimizations are really at work
  census  [url=ADDRESS | profile=... | traces=[FILE]] target=FOLDER
          say where a decode step's time goes
  sweep   what=drafts|sps|sts profile=... target=FOLDER draft=FOLDER
          find the draft length, write what dspark_compact needs

  splitserve train --help lists the recipes and what can be set.
"""


def _train_help() -> str:
    from splitserve.compose import group_options, recipe_names, setting_paths

    lines = ["usage: splitserve train recipe=NAME [setting=value ...]", "", "recipes:"]
    lines += [f"  {name}" for name in recipe_names()]
    lines += ["", "groups (GROUP=FILE):"]
    lines += [f"  {group}: {', '.join(files)}" for group, files in group_options().items()]
    lines += ["", "settings (NAME=VALUE):"]
    lines += [f"  {path}" for path in setting_paths()]
    return "\n".join(lines)


def _train(arguments: Sequence[str]) -> int:
    from splitserve.run.main import train

    return train(arguments)


def _eval(arguments: Sequence[str]) -> int:
    from splitserve.run.commands import evaluate

    return evaluate(arguments)


def _export(arguments: Sequence[str]) -> int:
    from splitserve.run.commands import export

    return export(arguments)


def _plan(arguments: Sequence[str]) -> int:
    from splitserve.run.planning import plan

    return plan(arguments)


def _config(arguments: Sequence[str]) -> int:
    from splitserve.compose import compose, to_yaml

    print(to_yaml(compose(arguments)), end="")
    return 0


def _data(arguments: Sequence[str]) -> int:
    from splitserve.data.commands import run

    return run(arguments)


def _serving(name: str) -> Callable[[Sequence[str]], int]:
    def command(arguments: Sequence[str]) -> int:
        from splitserve import serving_commands

        found: Callable[[Sequence[str]], int] = getattr(serving_commands, name)
        return found(arguments)

    return command


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "eval": _eval,
    "export": _export,
    "plan": _plan,
    "config": _config,
    "data": _data,
    **{name: _serving(name) for name in ("serve", "bench", "gate", "audit", "census", "sweep")},
}


def _terminate(number: int, frame: object) -> None:
    # Before a run's own handler is in place, SIGTERM is to unwind like Ctrl-C.
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 (failed), 2 (bad input) or 130 (stopped)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"splitserve {__version__}")
        return 0
    name, *rest = arguments
    began = time.time()
    try:
        if name not in COMMANDS:
            raise UserError("command", name, ", ".join(COMMANDS), suggest(name, COMMANDS))
        if any(a in ("-h", "--help") for a in rest):
            print(_train_help() if name in ("train", "plan", "config") else USAGE)
            return 0
        signal.signal(signal.SIGTERM, _terminate)
        return COMMANDS[name](rest)
    except RunFailed as error:
        print(f"splitserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("splitserve: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        # Checks below the command line raise ValueError with the same four parts.
        if isinstance(error, ValueError) and _is_a_check_of_ours(error):
            print(f"splitserve: {error}", file=sys.stderr)
            return 2
        _report_a_bug(error, _crash_log(rest, began))
        return 1


def _is_a_check_of_ours(error: ValueError) -> bool:
    """Whether a `raise` of ours made the error; a library, or `int("x")` in our code, did not."""
    if isinstance(error, UserError):
        return True
    place = error.__traceback__
    assert place is not None, "an error that was caught has a traceback"
    while place.tb_next is not None:
        place = place.tb_next
    package = place.tb_frame.f_globals.get("__name__", "").split(".")[0]
    raised = place.tb_frame.f_code.co_code[place.tb_lasti] == opmap["RAISE_VARARGS"]
    return raised and package in ("splitserve", "dspark", "serving")


def _crash_log(arguments: Sequence[str], began: float) -> Path | None:
    """Where the traceback of this command belongs: the run that it names, or has just begun."""
    options = dict(a.partition("=")[::2] for a in arguments)
    if named := options.get("run_dir") or options.get("run"):
        folders = [Path(named)]
    else:
        # File times come from a coarser clock that may lag by a tick.
        folders = [p for p in Path("runs").glob("*/*") if p.stat().st_mtime >= began - 0.1]
    logs = [p / "logs" for p in folders if (p / "logs").is_dir()]
    return max(logs, key=lambda p: p.stat().st_mtime) / "splitserve.log" if logs else None


def _report_a_bug(error: Exception, log: Path | None) -> None:
    """One line for the terminal; the traceback goes to the run's log, if there is one."""
    line = f"splitserve: unexpected {type(error).__name__}: {' '.join(str(error).split())}"
    text = "".join(traceback.format_exception(error))
    try:
        if log is None:
            raise FileNotFoundError
        with open(log, "a") as file:
            file.write(text)
        print(f"{line}; traceback: {log}", file=sys.stderr)
    except OSError:
        print(f"{text}{line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
