"""Shell completion by argcomplete: commands and options from the parser, and existing presets, stages and runs.

    eval "$(turnwise completion bash)"      # for this shell; into ~/.bashrc for all

The shell runs this at each tab, so nothing heavy is imported here. [argcomplete]
"""

from __future__ import annotations

import argparse
import os
import sqlite3
from argparse import Namespace
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from flows import parts
from flows.registry import STAGES
from stages.frame.types import UsageError
from stages.store.shared import FILE

SHELLS = ("bash", "zsh", "fish")
NEWEST = 50  # runs that are offered


def completion(args: Namespace) -> int:
    """turnwise completion SHELL"""
    from argcomplete.shell_integration import shellcode

    if args.shell not in SHELLS:
        raise UsageError(f"completion: there is no shell {args.shell[:20]!r} here; give one of {', '.join(SHELLS)}.")
    print(shellcode(["turnwise"], shell=args.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell and end the process."""
    import argcomplete

    for one in _all_parsers(parser):
        for action in one._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            if (names := _names(action)) is not None:
                action.completer = names  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options=False)


def _all_parsers(parser: argparse.ArgumentParser) -> Iterable[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _all_parsers(child)


def _names(action: argparse.Action) -> Any:
    """What completes an argument; None where argparse or the shell knows better."""
    metavar = str(action.metavar)
    if metavar == "PRESET":
        return lambda prefix="", **_: presets(prefix)
    if metavar == "SHELL":
        return lambda **_: list(SHELLS)
    if metavar in ("STAGE", "LAST"):
        return lambda **_: list(STAGES)
    return (lambda **_: runs(Path.cwd())) if metavar.startswith("RUN") else None


def presets(prefix: str) -> list[str]:
    """Tasks; and after a "+", the parts that may still be added."""
    before = prefix.split("+")[:-1]
    kinds = parts.kinds() | dict.fromkeys(parts.SHORT, "task")
    taken = {kinds.get(word) for word in before}
    begun = "".join(f"{word}+" for word in before)
    return [f"{begun}{name}" for name, kind in kinds.items() if (kind not in taken if before else kind == "task")]


def runs(here: Path) -> list[str]:
    """Starts of the ids of the project's newest runs, read from MLflow's store without MLflow. A shared store is not
    asked: a tab should not wait for a server.
    """
    home = next((one for one in (here, *here.parents) if os.path.isfile(one / "mlflow" / "mlflow.db")), None)
    if home is None or os.path.isfile(home / FILE):
        return []
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{home}/mlflow/mlflow.db?mode=ro", uri=True)) as store:
        found = store.execute("select run_uuid from runs order by start_time desc limit ?", [NEWEST]).fetchall()
        return [run_id[:8] for (run_id,) in found]
    return []
