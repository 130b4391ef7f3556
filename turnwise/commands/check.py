"""turnwise check: the contract suite, on an environment of one's own."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from flows import presets
from flows.report import emit
from flows.workspace import find_home
from stages.envs.suite import Finding, Subject, examine, replies_of
from stages.frame.own import apart
from stages.frame.types import Ask, Message, printable

MARKS = {"ok": "ok", "broken": "BROKEN", "left out": "left out"}


def check(args: Namespace) -> int:
    """turnwise check NAME; exit status 1 where a claim is broken."""
    os.chdir(find_home(args.home))
    config = presets.resolve({"preset": "check", "task": {"env": args.name}}, args.set)
    task, found = config.task, list[Finding]()
    with apart():
        replies = args.reply or replies_of(task.env)
    subject = Subject(task.env, task.options, None if args.answer is None else answering(args.answer), replies)
    findings = examine(subject)
    while True:
        with apart():  # what the environment prints
            one = next(findings, None)
        if one is None:
            break
        found.append(one)
        if not args.json:
            said = f": {printable(one.said)}" if one.said else ""
            print(f"{MARKS[one.status]:<8}  {one.claim}{said}", flush=True)
    count = Counter[str](one.status for one in found)
    if args.json:
        emit({"environment": task.env, "findings": [asdict(one) for one in found]})
    else:
        print(told(task.env, count))
    if not replies and not args.quiet:
        print(
            "Give replies that end an episode, as --reply 'Action: stop', to check what comes of them.", file=sys.stderr
        )
    return int(count["broken"] > 0)


def told(name: str, count: Counter[str]) -> str:
    """The last line of the report."""
    if count["broken"]:
        return f"{name}: {count['broken']} of {count.total()} claims are broken. Mend them: docs/how-to/environment-options.md, The contract."
    left = f", {count['left out']} left out" if count["left out"] else ""
    return (
        f"{name}: {count['ok']} of {count.total()} claims hold{left}. Next: turnwise run PRESET --set task.env={name}"
    )


def answering(text: str) -> Ask:
    """An LLM that always says the same."""

    def ask(messages: Sequence[Message], *, temperature: float = 0.0, seed: int = 0) -> str:
        return text

    return ask
