"""What a newly made base model can do with prompts and scenarios that it has not seen, and the card that tells it.
Ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

from stages import envs
from stages.corpora import game24_trees, math_chains, wiki_walks
from stages.envs.math_answers import boxes
from stages.frame.types import Episode
from stages.llm.hf import HfEngine
from stages.llm.roles import Roles, ask
from stages.play.rollout import RolloutSettings, rollout

AGENTS: dict[str, tuple[dict[str, Any], Literal["react", "cot"]]] = {
    "math": ({"levels": list(math_chains.LEVELS)}, "cot"),
    "game24": (dict(game24_trees.OPTIONS), "react"),
    "wiki_search": (dict(wiki_walks.OPTIONS), "react"),
}
"""Task -> options of its environment, and how the policy acts in it; of the shipped problems, puzzles and pages."""


def role_scores(folder: Path, probe: list[dict[str, Any]]) -> dict[str, float]:
    """Share of held-out prompts that each role of the desk answers exactly, greedily; of the evaluator also the share
    of right verdicts.

    policy and successor have many right answers, so theirs is the share of readable ones.
    """
    replies = ask(
        HfEngine(str(folder)), [row["messages"] for row in probe], role="probe", adapter=None, temperature=0.0,
        max_tokens=64, seed=0,
    )  # fmt: skip
    right: dict[str, list[bool]] = defaultdict(list)
    for row, (_, reply) in zip(probe, replies, strict=True):
        role, want, got = row["role"], row["reply"], reply.text
        if role == "policy":
            right[role].append(got.startswith("Thought:") and got.split()[-2:-1] == want.split()[-2:-1])
        elif role == "successor":
            right[role].append(got.startswith("Future:") and " then " in got)
        else:
            right[role].append(got == want)
        if role == "evaluator":
            right["evaluator_verdict"].append(got.split()[:2] == want.split()[:2])
    return {f"pretrain/{role}": sum(found) / len(found) for role, found in right.items()}


def play_scores(folder: Path, prompts: Mapping[str, Roles], n: int) -> dict[str, float]:
    """Shares over n episodes a task on the validation split, whose few questions of wiki_search come again, at
    temperature 1.

    Of replies that can be read, in math those with one box; of legal expansions and submissions in game24; of episodes
    won, in math by level.
    """
    engine, found = HfEngine(str(folder)), {}
    for task, (options, agent) in AGENTS.items():
        scenarios = list(islice(cycle(envs.scenarios(task, options, "validation", None, 0)), n))
        settings = RolloutSettings(None, 1.0, 100, 10, 1, 64, 1, 0, agent)
        episodes = rollout(engine, envs.make_env(task, options), scenarios, prompts[task], settings)
        turns = [turn for e in episodes for turn in e.turns]
        if task == "math":
            found["math_boxed"] = _share([len(boxes(str(e.messages[-2]["content"]))) == 1 for e in episodes])
        else:
            found[f"{task}_readable"] = _share([not turn.malformed for turn in turns])
        if task == "game24":
            found["game24_legal"] = _share(
                [not turn.malformed and not turn.observation.startswith("Not possible") for turn in turns]
            )
        found |= _wins(task, episodes)
    return {f"pretrain/{name}": share for name, share in found.items()}


def _wins(task: str, episodes: list[Episode]) -> dict[str, float]:
    if task != "math":
        return {f"{task}_won": _share([e.won for e in episodes])}
    levels = {level: [e.won for e in episodes if e.scenario.data["level"] == level] for level in math_chains.LEVELS}
    return {f"math_won_level{level}": _share(won) for level, won in levels.items() if won}


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found)


def lines(scores: Mapping[str, float]) -> str:
    """Rows of a card's table."""
    return "\n".join(f"| {name.removeprefix('pretrain/')} | {share:.3f} |" for name, share in sorted(scores.items()))


def desk_card(made: str, n_probe: int, scores: Mapping[str, float]) -> str:
    """made: model and schedule, in a line."""
    return f"""# The embedded base model

A word-level Llama-shaped decoder, {made} examples of `stages/corpora/desk.py`. It knows the language of the roles on `service_desk`,
and no rule of any desk: every training example has a rule book of its own, drawn at random (`tests/corpora/test_desk.py`).

Made only to try the pipeline on a laptop. It can do nothing else.

| role, on {n_probe} held-out prompts each | right |
|---|---|
{lines(scores)}

policy, successor: share of readable replies, as many are right. The others: share of replies equal to the one right answer.
The refiner answers a bare "Optimality: No." with any other option, which counts as wrong here although it is not.

`general.jsonl`: role rows for mixing into training. `probe.jsonl`: held-out role rows, the forgetting probe of `evaluate`.
"""


def agents_card(made: str, n_episodes: int, scores: Mapping[str, float]) -> str:
    """made: model and schedule, in a line."""
    return f"""# A base model that can act in math, game24 and wiki_search

A byte-level Llama-shaped decoder, {made} episodes of `stages/corpora/agents.py`:

    turnwise pretrain --set pretrain.corpus=agents --out data/base_agents

It knows the form of the policy's replies in these three environments, and honest basics: one step of arithmetic a paragraph (a third of the chains
that it was shown has a wrong step), legal moves of Game of 24 chosen mostly at random, and tools of wiki_search used mostly at random in wikis that are not the
shipped one. Nobody showed it which way wins. No problem, puzzle or question of a held-out split is among its episodes (`tests/corpora/test_agent_corpus.py`);
that 7 + 5 = 12 is, as a step of longer problems, even where "What is 7 + 5?" is held out.

Made only to try the pipeline on a laptop. It can do nothing else.

| on {n_episodes} episodes of the validation split each, temperature 1 | share |
|---|---|
{lines(scores)}

boxed: of its replies in math, those with one box. readable: of its replies. legal: of its replies in game24, those that the game carried out. won: of the episodes; math by level (1 and 2 steps).
"""
