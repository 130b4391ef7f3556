"""Where the base model plays a role wrongly: share of exact replies by role, number of steps of the desk, and step.

    python -m benchmarks.base_roles

combine and corrector are told of a broken rule of the first step, which they have to carry over word by word: a wrong
word there becomes a wrong target. Every example has a random rule book, as in the corpus (stages/corpora/desk.py).
"""

from __future__ import annotations

import argparse
import random

from stages.corpora import Example
from stages.corpora import desk as corpus
from stages.llm.hf import HfEngine
from stages.llm.roles import ask, load_roles


def examples(role: str, n_steps: int, step: int, n: int, rng: random.Random) -> list[Example]:
    """n examples of visits with so many steps whose first step broke its rule, about the step that is asked for."""
    roles = load_roles("service_desk")
    found: list[Example] = []
    while len(found) < n:
        v = corpus.visit(rng)
        if len(v.chosen) != n_steps or v.chosen[0][1] == v.needed[0].option:
            continue
        rest = corpus.future(v.chosen[step:], v.broken())
        if role == "combine":
            tool, option = v.chosen[step]
            later = corpus.future(v.chosen[step + 1 :], v.broken())
            fields = {"observation": f"{option} done.", "reward": "none", "future": later}
            prompt = roles.prompt("combine", corpus.state(v, step), action=f"{tool} {option}", thought="", **fields)
        else:
            prompt = roles.prompt("corrector", corpus.state(v, step), text=rest)
        found.append(Example(role, tuple(prompt), rest))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="data/base")
    parser.add_argument("-n", type=int, default=200, help="examples a cell")
    args = parser.parse_args()
    engine = HfEngine(args.path)
    print("| role | steps of the desk | step | exact |\n|---|---|---|---|")
    for role in ("combine", "corrector"):
        for n_steps in (3, 4):
            for step in range(n_steps - 1):
                asked = examples(role, n_steps, step, args.n, random.Random(f"{role} {n_steps} {step}"))
                replies = ask(
                    engine,
                    [list(e.messages) for e in asked],
                    role=role,
                    adapter=None,
                    temperature=0.0,
                    max_tokens=64,
                    seed=0,
                )
                right = sum(reply.text == e.reply for (_, reply), e in zip(replies, asked, strict=True))
                print(f"| {role} | {n_steps} | {step + 1} | {right / len(asked):.2f} |")


if __name__ == "__main__":
    main()
