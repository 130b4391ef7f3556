"""Environments: text in, text out, reward. Each is one module, found by its name.
Your own has a name with a dot, and is a module of the project folder (stages/frame/own.py).

A module is an environment when it exports
    OPTIONS                            its frozen pydantic Config
    make(options, ask)                 -> a function that makes one Env; `ask` is the LLM inside it, or None
    scenarios(options, split, n, seed) -> the first n scenarios of a split in an order fixed by the seed; None = all
and, where it can tell more of episodes than their rewards,
    describe(options, episodes)        -> numbers by name, which evaluate reports
    lessons(turns, won)                -> what a parser of the words makes of an episode: each action's text, mended, or None
    n_wrong(observation)               -> how many turns the last observation says were wrong
    perfect(options, role, messages)   -> what a perfect critic's role says to this prompt, where the optimum is known
and, where it reads less than any action of ReAct's form,
    readable(options, state, reply)    -> raises Malformed where `step` would not read the reply in this state, or
        nobody should learn it
and, for the contract suite (suite.py),
    REPLIES                            readable replies that, said again and again, bring any episode to its end
They may trust `options`: they are checked here. They are not trusted themselves: what they hand over is checked, too
(stages/frame/border.py). No environment imports torch or an LLM.

Modules:

    service_desk      the embedded task: a desk with hidden rules that only the closing audit names
    desk_rules        its size, its steps, its rule book
    desk_words        what is said there, from the right option to a bare verdict, and what a parser makes of it
    wide_desk         a desk whose actions are phrases, 3 to 3,125 of them a step
    wide_rules        its size, its rule book, pairs of values that are held out
    wide_words        its phrases, what an audit names of a wrong one, and what a parser makes of it
    twenty_questions  20 Questions
    objects           its objects, and names recognised in a question
    game24            Game of 24 as a search tree
    game24_tree       the tree: nodes, steps, what is legal
    exact24           exact search over fractions: which numbers can still make 24
    math              one problem, one answer in free text
    arithmetic        its shipped problems
    math_answers      where the answer of a reply stands
    math_verifier     math-verify in a process of its own, with a time limit
    sums              a few steps of arithmetic, in one reply or step by step, for a small model
    wiki_search       a question, and pages to be found and read
    wiki_corpus       the pages: links, numbered lines, full-text search
    wiki_sample       its shipped pages and questions
    tau_bench         tau-bench: a customer, tools on a database, a written policy
    tau_data          its data on disk: tables, policies, tool definitions, tasks
    tau_database      copy-on-write records, what an episode changed, the benchmark's hash
    tau_tools         how a tool is called; calculate, think, transfer
    tau_retail        the shop's tools
    tau_airline       the airline's tools
    tau_user          the simulated customer
    squad             exact match and F1 of answers
    files             data files read line by line, broken ones named
    splits            train, validation and test by a seeded hash
    suite             what every environment must do: the claims of `turnwise check`
    oracle            who answers: a rule over a table, or an LLM that is handed in
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from pydantic import ValidationError

from stages.frame.border import At, number_of, numbers_of, scenarios_of, shown, text_of
from stages.frame.checked_env import checked
from stages.frame.contract import Config
from stages.frame.own import is_own, own_file, own_module, telling
from stages.frame.types import Ask, Env, Episode, Message, Scenario, UsageError

EXPORTS = ("OPTIONS", "make", "scenarios")


class EnvModule(Protocol):
    """What a module exports to be an environment."""

    OPTIONS: type[Config]

    def make(self, options: Mapping[str, Any], ask: Ask | None) -> Callable[[], Env]: ...

    def scenarios(self, options: Mapping[str, Any], split: str, n: int | None, seed: int) -> list[Scenario]: ...


def environments() -> list[str]:
    """Names of all environments that ship, sorted. Helper modules, which make nothing, are not among them."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return sorted(name for name in names if _is_environment(importlib.import_module(f"{__name__}.{name}")))


def make_env(
    name: str, options: Mapping[str, Any], ask: Ask | None = None, *, limit_s: float = 0.0
) -> Callable[[], Env]:
    """A function that makes one checked environment at each call (stages/frame/checked_env.py). limit_s: seconds that
    it may take for an answer; 0 = any. Raises UsageError for an unknown name or option.
    """
    module = _module(name)
    _check(name, module.OPTIONS, options)
    at = _at(name, "make")
    with telling("task.env", name, "make"):
        make = module.make(options, ask)
    if not callable(make):
        raise at.broken("a function that makes an Env", shown(make), "return the class, or a lambda: Env(options)")
    return checked(make, at.where, limit_s=limit_s, more=at.more)


def scenarios(name: str, options: Mapping[str, Any], split: str, n: int | None, seed: int) -> list[Scenario]:
    """Scenarios of a split; the same arguments give the same list. Raises UsageError for an unknown name or option."""
    module = _module(name)
    _check(name, module.OPTIONS, options)
    with telling("task.env", name, "scenarios"):
        found = module.scenarios(options, split, n, seed)
    return scenarios_of(_at(name, "scenarios"), found, split, n)


def options_of(name: str) -> type[Config]:
    """The config of an environment's options. Raises UsageError for an unknown name."""
    return _module(name).OPTIONS


def checked_options(name: str, options: Mapping[str, Any]) -> Config:
    """The options as the environment's own config. Raises UsageError for an unknown name or option."""
    return _check(name, _module(name).OPTIONS, options)


def module_name(name: str) -> str:
    """Full name of an environment's module. Raises UsageError for an unknown name."""
    _module(name)
    return name if is_own(name) else f"{__name__}.{name}"


def replies(name: str) -> tuple[str, ...]:
    """Replies that the environment's module says it can read, for the contract suite; () where it exports no REPLIES.
    Raises UsageError for an unknown name, and for what are no texts.
    """
    at, found = _at(name, "REPLIES"), getattr(_module(name), "REPLIES", ())
    if not isinstance(found, (tuple, list)):
        raise at.broken("a tuple of texts", shown(found), 'as ("Action: stop", "Action: go")')
    return tuple(text_of(at, "reply", one) for one in found)


def has(name: str, export: str) -> bool:
    """Whether the environment exports this, too. Raises UsageError for an unknown name."""
    return hasattr(_module(name), export)


def describe(name: str, options: Mapping[str, Any], episodes: Sequence[Episode]) -> dict[str, float]:
    """What the environment tells of its episodes beside their rewards; nothing where it exports no `describe`. Raises
    UsageError as above.
    """
    module = _module(name)
    _check(name, module.OPTIONS, options)
    tell: Callable[[Mapping[str, Any], Sequence[Episode]], dict[str, float]] | None = getattr(module, "describe", None)
    with telling("task.env", name, "describe"):
        found = tell(options, episodes) if tell else {}
    return numbers_of(_at(name, "describe"), found)


def lessons(name: str, turns: Sequence[tuple[str, str]], *, won: bool) -> list[str | None]:
    """What the environment's parser of the words makes of an episode's (action, observation): each action's text, mended,
    or None where it says nothing of it. Raises UsageError as above.
    """
    at, module = _at(name, "lessons"), cast(Any, _module(name))
    with telling("task.env", name, "lessons"):
        found = module.lessons(turns, won=won)
    if not isinstance(found, (tuple, list)) or len(found) != len(turns):
        raise at.broken(
            f"a list of {len(turns)} texts, one a turn", shown(found), "None where nothing is said of a turn"
        )
    return [None if one is None else text_of(at, "lesson", one) for one in found]


def n_wrong(name: str, observation: str) -> float:
    """How many turns the last observation says were wrong. Raises UsageError as above."""
    with telling("task.env", name, "n_wrong"):
        found = cast(Any, _module(name)).n_wrong(observation)
    return number_of(_at(name, "n_wrong"), "number of wrong turns", found)


def perfect(name: str, options: Mapping[str, Any], role: str, messages: Sequence[Message]) -> str:
    """What a perfect role says to this prompt. Raises UsageError where the environment exports no `perfect`, and as above."""
    if not has(name, "perfect"):
        raise UsageError(
            f'roles.oracle: {name} has no function `perfect`, so no role can be replaced; set it to "none"'
        )
    _check(name, _module(name).OPTIONS, options)
    with telling("task.env", name, "perfect"):
        found = cast(Any, _module(name)).perfect(options, role, messages)
    return text_of(_at(name, "perfect"), "reply", found)


def check_readable(name: str, options: Mapping[str, Any], state: Sequence[Message], reply: str) -> None:
    """Raises Malformed for a reply that the environment could not read in this state; never where it exports no
    `readable`. Raises UsageError as above.

    state: the messages before it, the system message first. reply: its text, without a <think> part in front, as `step`
    is handed it.
    """
    module = _module(name)
    check: Callable[[Mapping[str, Any], Sequence[Message], str], None] | None = getattr(module, "readable", None)
    if check is not None:
        _check(name, module.OPTIONS, options)
        with telling("task.env", name, "readable"):
            check(options, state, reply)


def _at(name: str, method: str) -> At:
    """Where a value of this environment comes from."""
    return At(f"{name} ({own_file(name)})" if is_own(name) else name, method, f"turnwise check {name}")


def _is_environment(module: object) -> bool:
    return all(hasattr(module, export) for export in EXPORTS)


def _module(name: str) -> EnvModule:
    if is_own(name):
        own = own_module("task.env", name, EXPORTS)
        if not (isinstance(own.OPTIONS, type) and issubclass(own.OPTIONS, Config)):
            raise UsageError(
                f"task.env: OPTIONS of {own_file(name)} wants a class that extends Config of stages.frame.contract, found {own.OPTIONS!r}."
            )
        return cast(EnvModule, own)
    if name.isidentifier() and name in {module.name for module in pkgutil.iter_modules(__path__)}:
        module = importlib.import_module(f"{__name__}.{name}")
        if _is_environment(module):
            return cast(EnvModule, module)
    known = environments()
    raise UsageError(
        f"task.env: there is no environment {name!r}{nearest(name, known)} Known: {', '.join(known)}; one of your own has a dot, like my.traffic."
    )


def nearest(word: str, known: list[str]) -> str:
    """How a sentence about an unknown word ends: '; did you mean x?' for the known word most like it, or '.' where none
    is.
    """
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else "."


def _check(name: str, config: type[Config], options: Mapping[str, Any]) -> Config:
    try:
        return config.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = sorted(config.model_fields)
        if first["type"] == "extra_forbidden":
            listed = ", ".join(known) or "none"
            raise UsageError(
                f"task.options: {name} has no option {key!r}{nearest(key, known)} Options: {listed}."
            ) from None
        found = repr(first["input"])[:80]
        raise UsageError(f"task.options.{key} of {name}: {first['msg']}; found {found}.") from None
