"""Where the base model plays a role wrongly: share of right replies by role, number of steps of the desk, and rung.

    python -m benchmarks.base_roles

A wrong word of combine or corrector becomes a wrong target, and one of the evaluator or refiner a wrong label. Every
example has a random rule book, as in the corpus (stages/corpora/desk.py). Right is the one right answer; of the refiner
that is told no option, any other option than those that are wrong.
"""

from __future__ import annotations

import argparse
import random
import re

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


def right(e: Example, reply: str) -> bool:
    asked = str(e.messages[-1]["content"])
    if e.role != "refiner" or "may need" in asked:
        return reply == e.reply
    barred = re.findall(r"(?:Action: |bar )(\w+ \w+)", asked)
    tool, option = reply.split()[-2:] if len(reply.split()) > 1 else ("", "")
    return option in OPTIONS_OF.get(tool, ()) and tool == barred[0].split()[0] and f"{tool} {option}" not in barred


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
                prompts = [list(e.messages) for e in asked]
                replies = ask(engine, prompts, role=role, adapter=None, temperature=0.0, max_tokens=128, seed=0)
                shares = [right(e, reply.text) for (_, reply), e in zip(replies, asked, strict=True)]
                cells.append(f"{sum(shares) / len(shares):.2f}")
            print(f"| {role} | {n_steps} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
