"""The command line: `turnwise COMMAND ...`.

Results go to stdout (`--json`: one value), progress to stderr. Exit status: 0 done or reused, 1 failed, 2 wrong usage.
Built on argparse. `arguments/` has the commands. The code of a command is imported when it is called.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from turnwise.arguments import looking, running, serving
from turnwise.output import lasting

PRINTING = (
    "plan", "explain", "stages", "presets", "compare", "runs", "show", "lineage", "sql", "check", "verify", "doctor", "completion",
)  # fmt: skip
"""Commands that do nothing but print: they fail where it cannot be written. What the others did is done all the same."""


ASKED = "_ARGCOMPLETE"
"""The variable by which a shell asks for completions."""
GRACE_S = 5.0
"""How long a thread that is no daemon may go on after the command is done."""


class _Parser(argparse.ArgumentParser):
    """Names the nearest help along with a usage error."""

    def error(self, message: str) -> NoReturn:
        from stages.frame.types import printable

        self.exit(2, f"turnwise: {printable(message)[:500]}. See: {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="turnwise",
        description="Train LLM agents over many turns with a critic that speaks.",
        epilog="example: turnwise run demo",
    )
    parser.add_argument("--version", action="version", version=f"turnwise {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for group in (running, looking, serving):
        group.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    if ASKED in os.environ:
        from turnwise.completion import complete

        complete(build_parser())
    outlets = lasting()
    args = build_parser().parse_args(argv)
    status = _done(args)
    sys.stdout.flush()
    for lost in (outlet.lost for outlet in outlets):
        if lost is not None and not isinstance(
            lost, BrokenPipeError
        ):  # as in `turnwise runs | head`: whoever read has read enough
            print(f"turnwise: what was printed could not be written ({lost.strerror}).", file=sys.stderr)
            status = status or int(args.command in PRINTING)
    if argv is None:
        _leave_threads(status)
    return status


def _leave_threads(status: int) -> None:
    """Let the process end. Python waits for every thread that is no daemon, and an environment may have left one."""
    left = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    if not left:
        return

    def end() -> None:
        time.sleep(GRACE_S)
        if running := [repr(one.name) for one in left if one.is_alive()]:
            who = f"the thread {', '.join(running)[:200]} still ran"
            print(
                f"turnwise: {who} and was left; an environment ends its threads, or makes them daemons.",
                file=sys.stderr,
            )
            sys.stderr.flush()
        os._exit(status)

    threading.Thread(target=end, daemon=True).start()


def _done(args: argparse.Namespace) -> int:
    """Run the command and return its exit status. A failure is told in one sentence."""
    # Waiting threads spin only for a moment. Spinning for ever takes a shared core from others; not at all loses a
    # third of the speed.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    os.environ.setdefault("DO_NOT_TRACK", "1")  # neither Prefect nor MLflow reports anything to anybody
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the bars here are our own
    before = signal.signal(signal.SIGTERM, _terminated)
    from stages.frame.types import TurnwiseError, UsageError

    module, _, function = args.function.partition(":")
    try:
        return int(getattr(importlib.import_module(module), function)(args))
    except UsageError as error:
        print(f"turnwise: {error}", file=sys.stderr)
        return 2
    except TurnwiseError as error:
        print(f"turnwise: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "turnwise: interrupted; nothing is half-written, and the same command goes on from the last finished stage.",
            file=sys.stderr,
        )
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def _version() -> str:
    try:
        return version("turnwise")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "(not installed)"


def _terminated(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
