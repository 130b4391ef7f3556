"""20 Questions: find the object by yes/no questions; reward 1 at the win, else 0; the game ends after the last question.

Source: NLAC, arXiv 2512.04601 (reward, 20 questions, win = the object is named) and LMRL-Gym (oracle's prompt). Departures: the default
objects and their attributes are our own (stages/envs/data), so that a rule can answer offline; names are matched on word
boundaries; running out of questions is the rule of the game, hence terminated, not truncated; a reply with several
questions asks only the first. With `ask`, an LLM answers instead of the rule. An unreadable reply uses up no question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from stages.contract import Config
from stages.envs.objects import Names, Table, csv_table, own_table, words
from stages.envs.oracle import Oracle, llm_oracle, rule_oracle
from stages.envs.splits import check_split, deal, draw
from stages.react import parse_react
from stages.types import Ask, Env, Malformed, Message, Scenario, Step, UsageError

_SYSTEM = """You play 20 Questions. The other player thinks of an object; find out which, by asking yes/no questions, at most {questions}.
Ask one question a turn. You win as soon as you name the object in a question, such as "Is it a lamp?".
Reply in this form:
Thought: what you know so far and what is worth asking
Action: one yes/no question"""


class Options(Config):
    """Options of 20 Questions."""

    questions: int = Field(20, ge=1, description="Questions in a game. [paper]")
    win: Literal["named", "guess"] = Field(
        "named",
        description="What wins: any question that names the object [paper], or only one that guesses it alone, so that a list does not win [ours].",
    )
    reveal: bool = Field(False, description="Name the object when the game is lost. [ours]")
    objects: str = Field("", description="CSV file with a column 'object' (needs an LLM oracle); empty = the package's own. [ours; paper: THINGS]")
    test: float = Field(0.25, ge=0, le=1, description="Share of the objects in the test split. [ours; paper: 500 of 1,823]")
    validation: float = Field(0.15, ge=0, le=1, description="Share of the objects in the validation split. [ours; paper: none]")
    split_seed: int = Field(0, description="Another number deals the objects to the splits anew. [ours]")
    oracle_tries: int = Field(3, ge=1, description="Replies of an LLM oracle without yes or no, after which the episode fails. [ours]")


OPTIONS = Options


class TwentyQuestions:
    """One game."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, options: Options, names: Names, oracle: Oracle) -> None:
        self.system = _SYSTEM.format(questions=options.questions)
        self._options, self._names, self._oracle = options, names, oracle
        self._target, self._left = "", 0

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        self._target, self._left = scenario.data["object"], self._options.questions
        return ({"role": "user", "content": f"I am thinking of an object. You have {self._left} questions. What is the first one?"},)

    def step(self, message: Message) -> Step:
        """Ask the question of a ReAct reply. Raises Malformed, SimulatorError, and RuntimeError after the end."""
        if self._left == 0:
            raise RuntimeError("the game is over: call reset first")
        question = first_question(message)
        named = self._names.guessed(question) if self._options.win == "guess" else self._names.mentioned(question)
        if self._target in named:
            self._left = 0
            return _say(f"Yes, it is {self._target}. You win.", reward=1.0, terminated=True)
        answer = self._oracle(self._target, question)
        # Counted after the oracle: a failed oracle leaves the game where it was.
        self._left -= 1
        spoken = f"{answer.capitalize()}." if answer else "I cannot answer that with yes or no."
        if self._left:
            return _say(f"{spoken} {self._left} question{'s' if self._left > 1 else ''} left.")
        reveal = f" It was {self._target}." if self._options.reveal else ""
        return _say(f"{spoken} No questions left.{reveal} You lose.", terminated=True)


def first_question(message: Message) -> str:
    """The first question of the action: its first line with a '?', up to that; else its first line. Raises Malformed where it has no word."""
    content = message.get("content")
    if not isinstance(content, str):
        raise Malformed("the reply has no text")
    _, action = parse_react(content)
    lines = action.splitlines()
    question = next((line for line in lines if "?" in line), lines[0]).split("?")[0].strip()
    if not words(question):
        raise Malformed("there is no question after 'Action:'")
    return f"{question}?"


def _say(text: str, *, reward: float = 0.0, terminated: bool = False) -> Step:
    return Step(({"role": "user", "content": text},), reward=reward, terminated=terminated)


def _table(options: Options) -> Table:
    return csv_table(options.objects) if options.objects else own_table()


def make(options: Mapping[str, Any], ask: Ask | None) -> Callable[[], Env]:
    """Games over one table and one oracle: the rule, or an LLM where `ask` is given. Raises UsageError where neither can answer."""
    checked = Options.model_validate(dict(options))
    table = _table(checked)
    if ask is None and not table.attributes:
        raise UsageError(f"task.oracle: no rule can answer for the objects of {checked.objects!r}. Set task.oracle to engine or openai.")
    names = Names(table.items.values())
    oracle = rule_oracle(table) if ask is None else llm_oracle(ask, tries=checked.oracle_tries)
    return lambda: TwentyQuestions(checked, names, oracle)


def scenarios(options: Mapping[str, Any], split: str, n: int | None, seed: int) -> list[Scenario]:
    """The split's objects in an order fixed by the seed, the first n of them.

    Of the train split, n larger than it begins anew in another order; of the held-out splits no object comes twice.
    """
    checked = Options.model_validate(dict(options))
    check_split("twenty_questions", split)
    shares = {"test": checked.test, "validation": checked.validation}
    items = [item for item in _table(checked).items.values() if deal(item.name, checked.split_seed, **shares) == split]
    return [Scenario("twenty_questions", split, item.name, {"object": item.name}) for item in draw(items, split, n, seed)]
