"""Scores of a new base model on prompts and scenarios that it has not seen, and the card that lists them. Ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

from stages import envs
from stages.corpora import game24_trees, math_chains, twenty, wiki_walks
from stages.envs import sums
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


def role_scores(
    model: str, probe: list[dict[str, Any]], right: Callable[[Mapping[str, Any], str], dict[str, bool]], *,
    dtype: str = "float32", max_tokens: int = 64,
) -> dict[str, float]:  # fmt: skip
    """Share of held-out prompts that each role answers rightly, greedily, as `right` of its corpus tells.

    model: its folder or hub name. max_tokens: of a reply.
    """
    replies = ask(
        HfEngine(model, dtype=dtype), [row["messages"] for row in probe], role="probe", adapter=None, temperature=0.0,
        max_tokens=max_tokens, seed=0,
    )  # fmt: skip
    found: dict[str, list[bool]] = defaultdict(list)
    for row, (_, reply) in zip(probe, replies, strict=True):
        for name, is_right in right(row, reply.text).items():
            found[name].append(is_right)
    return {f"pretrain/{name}": _share(marks) for name, marks in found.items()}


def play_scores(folder: Path, prompts: Mapping[str, Roles], n: int) -> dict[str, float]:
    """Shares over n episodes a task on the validation split, at temperature 1; few questions of wiki_search come again.

    Shares of readable replies (in math: with one box), of legal expansions and submissions in game24, and of won
    episodes (in math by level).
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
What is given away, and so to every method that starts from it: the order of the tools, the options of each, and on which words of a customer the rule of a step
hangs. So a method has to learn which option goes with which of these words, and nothing else.

Made only to try the pipeline on a laptop. It can do nothing else.

| role, on {n_probe} held-out prompts each | right |
|---|---|
{lines(scores)}

policy, successor: share of readable replies, as many are right. The others: share of replies equal to the one right answer.
The refiner answers a bare "Optimality: No." with any other option, which counts as wrong here although it is not.

`general.jsonl`: role rows for mixing into training. `probe.jsonl`: held-out role rows, the forgetting probe of `evaluate`.
"""


def twenty_card(made: str, n_probe: int, scores: Mapping[str, float]) -> str:
    """made: model and schedule, in a line."""
    return f"""# A base model that can play 20 Questions, badly

A word-level Llama-shaped decoder, {made} examples of `stages/corpora/twenty.py`:

    turnwise pretrain --set pretrain.corpus=twenty --set roles.prompts=twenty --out data/base_twenty

It knows the language of the roles on `twenty_questions` with the options `size = {twenty.SIZE}`, `questions = {twenty.QUESTIONS}` and `brief`, and it knows the table:
its thoughts name an object that fits the answers so far, of the held-out splits, too, as a large model would know that a cat is a pet. Every method that starts
from it is given that. It plays at random: a question is about any of {twenty.ATTRIBUTES} attributes, a guess any object, one in {1 / twenty.FOLLOWS:.0f} that of the thought. Its successor
foresees random answers, so what comes of a question has to be learned. Its evaluator knows the principle that the prompt of the large models states: a question
whose answer is foreseen is no use, nor is a guess that will be wrong (`tests/corpora/test_twenty.py`).

Made only to try the pipeline on a laptop. It can do nothing else.

| role, on {n_probe} held-out prompts each | right |
|---|---|
{lines(scores)}

combine, corrector, evaluator: share of replies equal to the one right answer. successor: of replies that have the form. policy: of replies that the game can read,
and of those whose thought fits all answers. refiner: of replies that do what the evaluation says, with a question that is new or an object that fits.

`probe.jsonl`: held-out role rows, the forgetting probe of `evaluate`.
"""


def maths_card(made: str, n_probe: int, scores: Mapping[str, float]) -> str:
    """made: model and schedule, in a line."""
    return f"""# A base model that does sums, nearly

A word-level Llama-shaped decoder, {made} examples of `stages/corpora/maths.py`:

    turnwise pretrain --set pretrain.corpus=maths --set roles.prompts=maths --out data/base_maths

It knows the language of the roles on `sums`, in one reply and step by step, of one to {sums.MOST_STEPS} steps, with and without `reveal`; which step is next; and about how large
a result is: each one that it was shown is the right one, one less, or one more, as often as each other. All methods that start from it are given that. Which of
the three is right it was never shown, nor which solutions are judged right: its successor foresees verdicts, and answers that are told, at random
(`tests/corpora/test_maths.py`).

Made only to try the pipeline on a laptop. It can do nothing else.

| role, on {n_probe} held-out prompts each | right |
|---|---|
{lines(scores)}

combine, corrector, evaluator: share of replies equal to the one right answer. successor: of replies that have the form. policy: of solutions and steps that are of
the problem and whose results are all within one of the right ones. refiner: of those that also do what the evaluation says; told only what may be wrong it often tries that again, about as often as chance has it.

`probe.jsonl`: held-out role rows, the forgetting probe of `evaluate`.
"""


def wide_card(made: str, n_probe: int, scores: Mapping[str, float]) -> str:
    """made: model and schedule, in a line."""
    return f"""# A base model for the wide desk

A word-level Llama-shaped decoder, {made} examples of `stages/corpora/wide.py`:

    turnwise pretrain --set pretrain.corpus=wide --set roles.prompts=wide_desk --out data/base_wide

It knows the language of the roles on `wide_desk`, on every rung of its audit. A visit has one to three steps, a phrase one to five slots of two to five values: 2 to 3,125
actions a step. It knows no rule of any desk: every training example has right phrases of its own, drawn at random (`tests/corpora/test_wide.py`).
What is given away, and so to every method that starts from it: slots and values in their order, and that a thought names tier and request.

Made only to try the pipeline on a laptop. It can do nothing else.

| on {n_probe} held-out prompts of each role | right |
|---|---|
{lines(scores)}

combine, corrector, evaluator: share of replies equal to the one right answer. policy: of phrases that a desk of this size can read. refiner: of those that do what
the evaluation says and nothing else. successor: of replies that have the form. slots, values: share of all roles' replies, by the size of the desk.

`probe.jsonl`: held-out role rows, the forgetting probe of `evaluate`.
"""


def warmed_card(base: str, how: str, n_probe: int, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """how: corpus and schedule, in a line. before, after: scores of the model as it was, and warmed."""
    rows = "\n".join(
        f"| {name.removeprefix('pretrain/')} | {before[name]:.3f} | {share:.3f} |"
        for name, share in sorted(after.items())
    )
    return f"""# {Path(base).name}, warmed for the roles of a task

{base}, after {how}.
Its licence is that of {base}.

It has learned how the roles speak. What the corpus draws at random, it does not know.

| role, on {n_probe} held-out prompts each | right before | right now |
|---|---|---|
{rows}

Right is what the corpus calls so. `probe.jsonl`: held-out role rows, the forgetting probe of `evaluate`.
"""


def own_card(made: str, n_probe: int, scores: Mapping[str, float]) -> str:
    """made: model and schedule, in a line."""
    return f"""# A base model for a task of one's own

A word-level Llama-shaped decoder, {made} examples of the project's own corpus. Made only to try the pipeline; it can do nothing else.

| role, on {n_probe} held-out prompts each | right |
|---|---|
{lines(scores)}

Right is what the corpus calls so (`right`); where it has no such function, a reply that can be read.

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
