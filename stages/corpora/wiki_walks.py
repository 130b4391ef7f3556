"""Walks through wikis made by code: well-formed use of the tools, mostly at random, sometimes with the right answer.
Ours.

A title or an answer has a space before it, "NAVIGATE( The Blue Lantern)". So it has the same tokens as in the text from
which it is copied. Sometimes a title is wrong, and the walk goes on from there.

Every world is a sample of wiki_search with another seed than the shipped one, so no content of the shipped pages is in
here. Questions come from the training split only; a question's text decides its split in every world.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from stages import envs
from stages.corpora import Example
from stages.envs.wiki_corpus import Corpus, Page
from stages.envs.wiki_sample import sample
from stages.frame.types import Env, Message, Scenario
from stages.llm.roles import Roles

OPTIONS = {"validation": 0.25}  # of 80 questions; the default share is 7, too few to choose an adapter by
WORLDS = 100  # seeds 1 to 100
ACTIONS = 5  # the last one at the latest is a submission
NAMED_FIRST = 0.85  # begins with the page that the question names
SLIPS = 0.04  # share of titles that there are not
FITS = 0.6  # looks for an answer of the kind that is asked for
_ANSWERS = {
    "When": r"[0-9]{1,2} [A-Z][a-z]+ [0-9]{4}",
    "In which town": r"(?<=birth is )\w+",
    "In which year": r"(?<=founded in )[0-9]{4}",
    "On which river": r"River \w+",
    "How long": r"[0-9]+ kilometres",
}


@dataclass
class Walk:
    """The pages that the agent opened, the open one last, what it has saved, and whether it was wrong once."""

    corpus: Corpus
    question: str
    opened: list[Page] = field(default_factory=list)
    saved: set[str] = field(default_factory=set)
    slipped: bool = False


def example(rng: random.Random, roles: Roles) -> Example:
    """One walk until its submission."""
    scenarios, corpus, make_env = _world(rng.randint(1, WORLDS))
    scenario, env = rng.choice(scenarios), make_env()
    messages: list[Message] = [{"role": "system", "content": env.system}, *env.reset(scenario)]
    walk = Walk(corpus, str(scenario.data["question"]))
    for left in reversed(range(ACTIONS)):
        reply: Message = {"role": "assistant", "content": act(walk, left, rng)}
        step = env.step(reply)
        if step.terminated:
            break
        messages += [reply, *step.messages]
    return Example("wiki_search", tuple(roles.policy(messages)), reply["content"])


def act(walk: Walk, left: int, rng: random.Random) -> str:
    """The next reply. left: actions after this one."""
    if not walk.opened:
        named = max((title for title in walk.corpus.pages if title in walk.question), key=len)
        return _open(
            walk,
            named if rng.random() < NAMED_FIRST else rng.choice(list(walk.corpus.pages)),
            "start with the question.",
            rng,
        )
    page, draw = walk.opened[-1], rng.random()
    if not left or draw < 0.12 + 0.28 * (len(walk.opened) > 1):
        return f"Thought: that may be it.\nAction: SUBMIT( {_answer(walk, rng)})"
    if draw < 0.55 and page.title not in walk.saved:
        walk.saved.add(page.title)
        lines = sorted(rng.sample(range(1, len(page.lines) + 1), rng.choice((1, 1, 2))))
        return f"Thought: keep this.\nAction: SAVE_LINE_IDS({', '.join(map(str, lines))})"
    if draw < 0.62:
        return f"Thought: search the page.\nAction: FIND( {rng.choice(re.findall(r'[a-z]{4,}', ' '.join(page.lines)))})"
    if draw < 0.67 and len(walk.opened) > 1:
        walk.opened.pop()
        return "Thought: go back.\nAction: BACK()"
    return _open(walk, rng.choice(page.links), "follow a link.", rng)


def _open(walk: Walk, title: str, thought: str, rng: random.Random) -> str:
    if not walk.slipped and rng.random() < SLIPS:
        walk.slipped = True
        title = f"{title.rpartition(' ')[0]} {rng.choice(list(walk.corpus.pages)).rpartition(' ')[2]}".strip()
    if title in walk.corpus.pages:
        walk.opened.append(walk.corpus.pages[title])
    return f"Thought: {thought}\nAction: NAVIGATE( {title})"


def _answer(walk: Walk, rng: random.Random) -> str:
    """Something that stands on an opened page, of the kind that is asked for or of any."""
    pages = walk.opened[-1:] if rng.random() < 0.7 else walk.opened
    text = " ".join(line for page in pages for line in page.lines)
    wanted = next(pattern for asked, pattern in _ANSWERS.items() if walk.question.startswith(asked))
    fitting = re.findall(wanted, text) if rng.random() < FITS else []
    found: list[str] = fitting or [
        *re.findall("|".join(_ANSWERS.values()), text),
        *(link for page in pages for link in page.links),
    ]
    return rng.choice(found)


@functools.lru_cache(maxsize=WORLDS)
def _world(seed: int) -> tuple[list[Scenario], Corpus, Callable[[], Env]]:
    """Its questions of the training split, its pages, and what makes an environment of it."""
    options = {**OPTIONS, "sample_seed": seed}
    scenarios = envs.scenarios("wiki_search", options, "train", None, 0)
    return scenarios, sample(seed)[0], envs.make_env("wiki_search", options)
