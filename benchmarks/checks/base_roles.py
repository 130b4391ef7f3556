"""Where the base model plays a role wrongly: share of right replies by role, number of steps of the desk, and rung.

    python -m benchmarks.checks.base_roles

A wrong word of combine or corrector becomes a wrong target, and one of the evaluator or refiner a wrong label. Every
example has a random rule book, as in the corpus (stages/corpora/desk.py). Right is the one right answer; of the refiner
that is told no option, any other option than those that are wrong.

A second table is of what a consequence tells, tool by tool: combine has to know which option a customer lacks. In the
first one a tool that is nearly always asked about at the end of a visit hides the others.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Sequence
from functools import partial

from stages.corpora import Example
from stages.corpora import desk as corpus
from stages.envs.desk_words import OPTIONS_OF
from stages.llm.hf import HfEngine
from stages.llm.roles import ask, load_roles

ROLES = ("combine", "corrector", "evaluator", "refiner")


def examples(role: str, rung: str, n_steps: int, n: int, rng: random.Random) -> list[Example]:
    roles = load_roles("service_desk")
    found: list[Example] = []
    while len(found) < n:
        v = corpus.visit(rng)
        if len(v.chosen) == n_steps and v.rung == rung:
            found.append(corpus.MAKERS[role](v, rng, roles))
    return found


def lacking(tool: str, n: int, rng: random.Random) -> list[tuple[Example, str]]:
    """Prompts of combine about a step of this tool that is seen to lack something, each with what has to be said of it."""
    roles = load_roles("service_desk")
    found: list[tuple[Example, str]] = []
    while len(found) < n:
        v = corpus.visit(rng)
        if v.rung == "consequence":
            e = corpus.combine(v, rng, roles)
            found += [(e, said) for said in re.findall(rf"needs {tool} \w+", e.reply)]
    return found[:n]


def share_right(engine: HfEngine, asked: Sequence[Example], marks: Sequence[Callable[[str], bool]]) -> str:
    prompts = [list(e.messages) for e in asked]
    replies = ask(engine, prompts, role=asked[0].role, adapter=None, temperature=0.0, max_tokens=128, seed=0)
    return f"{sum(mark(reply.text) for mark, (_, reply) in zip(marks, replies, strict=True)) / len(asked):.2f}"


def right(e: Example, reply: str) -> bool:
    asked = str(e.messages[-1]["content"])
    if e.role != "refiner" or "may need" in asked:
        return reply == e.reply
    barred = re.findall(r"(?:Action: |bar )(\w+ \w+)", asked)
    tool, option = reply.split()[-2:] if len(reply.split()) > 1 else ("", "")
    return option in OPTIONS_OF.get(tool, ()) and tool == barred[0].split()[0] and f"{tool} {option}" not in barred


def contains(reply: str, *, said: str) -> bool:
    return f"{said}." in reply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="data/base")
    parser.add_argument("--steps", nargs="+", type=int, default=[3, 4, 5, 6, 7, 8])
    parser.add_argument("-n", type=int, default=100, help="examples a cell")
    args = parser.parse_args()
    engine = HfEngine(args.path)
    print(f"| role | steps | {' | '.join(corpus.RUNGS)} |\n|---|---|{'---|' * len(corpus.RUNGS)}")
    for role in ROLES:
        for n_steps in args.steps:
            cells = []
            for rung in corpus.RUNGS:
                asked = examples(role, rung, n_steps, args.n, random.Random(f"{role} {rung} {n_steps}"))
                cells.append(share_right(engine, asked, [partial(right, e) for e in asked]))
            print(f"| {role} | {n_steps} | {' | '.join(cells)} |", flush=True)
    print(f"\n| what is lacked at | {' | '.join(OPTIONS_OF)} |\n|---|{'---|' * len(OPTIONS_OF)}")
    cells = []
    for tool in OPTIONS_OF:
        known = lacking(tool, args.n, random.Random(f"lacking {tool}"))
        cells.append(share_right(engine, [e for e, _ in known], [partial(contains, said=said) for _, said in known]))
    print(f"| right | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
