"""game24: make 24 of four numbers, as a search tree: an action expands a node by one step, or submits a node.

    expand NODE: a op b = c     a new node, in which c stands for a and b of NODE; exact fractions, as in 8 / 3 = 8/3
    submit NODE                 the end: reward 1 if the node is 24 and nothing else

Reward range: {0, 1}, at the submission. Turn limit: `replies`, after which the game is lost; without one, `expansions`
limits the tree alone, only a submission is left then, and an episode without one is truncated by the rollout. A step
that is not possible (a number that is not there, a wrong result) is answered and changes nothing but the count of
replies; an action in another form is malformed.
Source: Tree of Thoughts, arXiv 2305.10601 (the puzzles); Self-AC slides (state = search tree, an action expands or
submits).
Departures: the default puzzles are all of 1..13 that can be solved, found by exact search, and not the published file
(`path`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stages.envs import exact24
from stages.envs.files import bad_file, read_rows
from stages.envs.game24_tree import Expand, Node, Submit, Tree, expanded, read_action, spaced, submitted
from stages.envs.service_desk import Truth
from stages.envs.splits import check_split, deal, draw
from stages.frame.contract import Config, DataPath
from stages.frame.react import parse_react
from stages.frame.types import Ask, Env, Message, Scenario, Step

_WANTED = "Give a CSV file with the columns 'Rank' and 'Puzzles' (four numbers from 1 to 13 that make 24)."

_SYSTEM = """Game of 24: make 24 of four numbers with + - * /, each number once. You search a tree. Node 0 holds the four numbers.
Expanding a node adds a node in which two of its numbers are replaced by their result. You win by submitting a node that is 24 alone.
You have {expansions} expansions and one submission.
Reply in this form:
Thought: what is worth trying
Action: expand NODE: a op b = c
or, at the end,
Action: submit NODE"""

Puzzle = tuple[int, ...]


class Options(Config):
    """Size of the tree, and which puzzles."""

    expansions: int = Field(
        12, ge=3, le=999, description="Nodes that may be added to the tree. [ours; paper: breadth 5 in each of 3 steps]"
    )
    replies: int = Field(
        0,
        ge=0,
        description="Actions after which the game is lost, impossible ones included; 0 = no end but a submission. [ours]",
    )
    show: Literal["tree", "new"] = Field(
        "tree", description="What an observation tells: all open nodes [slides], or only the new one [ours]."
    )
    expressions: bool = Field(
        False,
        description="`submit (1 + 2) * 8 * 1`, with or without `= 24` behind it, counts too; it needs no tree. [ours; paper: the form of an answer]",
    )
    path: DataPath = Field(
        "", description="CSV file of the published puzzles; empty = all that can be solved. [ours; paper: 4nums.com]"
    )
    test: float = Field(0.25, ge=0, le=1, description="Share of the puzzles in the test split, without `path`. [ours]")
    validation: float = Field(
        0.15, ge=0, le=1, description="Share of the puzzles in the validation split, without `path`. [ours]"
    )
    split_seed: int = Field(
        0, description="Another number deals the puzzles to the splits anew, without `path`. [ours]"
    )
    test_ranks: tuple[int, int] = Field(
        (901, 1000), description="First and last Rank of the test split of `path`. [paper]"
    )
    validation_ranks: tuple[int, int] = Field(
        (801, 900), description="First and last Rank of the validation split of `path`. [ours; paper: none]"
    )


OPTIONS = Options


class Game24:
    """One puzzle."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, options: Options) -> None:
        self.system = _SYSTEM.format(expansions=options.expansions) + (
            " or an expression" if options.expressions else ""
        )
        self._options = options
        self._tree: Tree | None = None
        self._replies = 0

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        self._tree, self._replies = _root(scenario, self._options), 0
        return self._say(self._tree, f"Node 0 is {spaced(self._tree.nodes[0].numbers)}.").messages

    def step(self, message: Message) -> Step:
        """Expand or submit. Raises Malformed, and RuntimeError after the end."""
        if (tree := self._tree) is None:
            raise RuntimeError("game24: there is no puzzle, or it is over; call reset first")
        _, text = parse_react(str(message.get("content") or ""))
        action = read_action(text, expressions=self._options.expressions)
        done = expanded(tree, action) if isinstance(action, Expand) else submitted(tree, action)
        self._replies += 1
        if isinstance(done, tuple):
            wins, what = done
            return self._end(tree, f"{what[0].upper()}{what[1:]}. You {'win' if wins else 'lose'}.", wins)
        if self._replies == self._options.replies:
            return self._end(tree, "That was the last reply, and nothing is submitted. You lose.", wins=False)
        if isinstance(done, str):
            return self._say(tree, f"Not possible: {done}.")
        self._tree, new = done, done.nodes[-1]
        return self._say(
            done, f"Node {len(done.nodes) - 1} is {spaced(new.numbers)}.{' It is a dead end.' if new.dead else ''}"
        )

    def _end(self, tree: Tree, text: str, wins: bool) -> Step:
        self._tree = None
        return Step(
            ({"role": "user", "content": text},),
            float(wins),
            terminated=True,
            info={"expansions": self._options.expansions - tree.left},
        )

    def _say(self, tree: Tree, text: str) -> Step:
        first = f"{text} {tree.left} expansion{'' if tree.left == 1 else 's'} left."
        lines = [first, *(tree.open_nodes if self._options.show == "tree" else ())]
        return Step(({"role": "user", "content": "\n".join(lines)},))


def _root(scenario: Scenario, options: Options) -> Tree:
    return Tree((Node(exact24.numbers_of(tuple(scenario.data["numbers"]))),), options.expansions)


def readable(options: Mapping[str, Any], state: Sequence[Message], reply: str) -> None:
    """Raises Malformed as the game would. A step that is not possible can be read: the game answers it."""
    read_action(parse_react(reply)[1], expressions=Options.model_validate(dict(options)).expressions)


def truth(options: Mapping[str, Any], scenario: Scenario, actions: Sequence[str]) -> Truth:
    """The truth about the last of `actions`, given those before it. Raises Malformed as the game would.

    q = Q*: 1 while some node is 24 or can still become it with the expansions that are left, after a submission its
    reward.
    Optimal is what lies on a shortest way to a win; where q is 0 before, nothing is. With `expressions` a win is one
    submission away.
    """
    checked = Options.model_validate(dict(options))
    tree, broken, q, cause = _root(scenario, checked), [], 0.0, ""
    for text in actions:
        action = read_action(text, expressions=checked.expressions)
        tree, q, cause = _judged(tree, action, at_once=checked.expressions and exact24.solvable(tree.nodes[0].numbers))
        broken += [cause] if cause else []
    return Truth(not cause, q, cause, tuple(broken))


def _judged(tree: Tree, action: Expand | Submit, *, at_once: bool) -> tuple[Tree, float, str]:
    """(tree after it, Q*, why it is not optimal or ""). at_once: a right expression may be submitted."""
    before = 0.0 if at_once else tree.to_win
    done = expanded(tree, action) if isinstance(action, Expand) else submitted(tree, action)
    if isinstance(done, tuple):
        wins, what = done
        return tree, float(wins), "" if wins else f"{what}, not 24."
    if isinstance(done, str):
        return tree, float(before < float("inf")), f"{done}."
    q = float(at_once or done.to_win < float("inf"))
    if done.to_win < before:
        return done, q, ""
    rest = done.nodes[-1].numbers
    if not exact24.solvable(rest):
        return done, q, f"{spaced(rest)} cannot make 24."
    return done, q, "there is a shorter way." if q else "24 is out of reach."


def make(options: Mapping[str, Any], ask: Ask | None = None) -> Callable[[], Env]:
    checked = Options.model_validate(dict(options))
    return lambda: Game24(checked)


def scenarios(options: Mapping[str, Any], split: str, n: int | None, seed: int) -> list[Scenario]:
    """Puzzles of a split in an order fixed by the seed, train over and over; `ways`: how many ways through the tree
    make 24.
    """
    checked = Options.model_validate(dict(options))
    check_split("game24", split)
    chosen = [puzzle for puzzle, of in _dealt(checked) if of == split]
    return [_scenario(split, puzzle) for puzzle in draw(chosen, split, n, seed)]


def _scenario(split: str, puzzle: Puzzle) -> Scenario:
    return Scenario(
        "game24", split, _id(puzzle), {"numbers": list(puzzle), "ways": exact24.ways(exact24.numbers_of(puzzle))}
    )


def _id(puzzle: Puzzle) -> str:
    return "-".join(map(str, puzzle))


def _dealt(options: Options) -> list[tuple[Puzzle, str]]:
    """(puzzle, split) for all of them."""
    if not options.path:
        shares = {"test": options.test, "validation": options.validation}
        return [(puzzle, deal(_id(puzzle), options.split_seed, **shares)) for puzzle in exact24.quadruples()]
    ranges = {"test": options.test_ranks, "validation": options.validation_ranks}
    return [
        (puzzle, next((split for split, (first, last) in ranges.items() if first <= rank <= last), "train"))
        for rank, puzzle in _published(Path(options.path))
    ]


@functools.lru_cache(maxsize=4)
def _published(path: Path) -> tuple[tuple[int, Puzzle], ...]:
    """(rank, puzzle) of a file like that of Tree of Thoughts. Raises UsageError."""
    found: dict[Puzzle, int] = {}
    for where, row in read_rows(path, _WANTED):
        words = str(row.get("Puzzles") or "").split()
        rank = str(row.get("Rank") or "")
        if (
            not rank.isdecimal()
            or len(words) != 4
            or not all(word.isdecimal() and 1 <= int(word[:3]) <= 13 for word in words)
        ):
            raise bad_file(path, f"{where} has no rank, or not four numbers from 1 to 13,", _WANTED)
        puzzle = tuple(sorted(map(int, words)))
        if puzzle in found or not exact24.solvable(exact24.numbers_of(puzzle)):
            raise bad_file(path, f"{where} {'comes twice' if puzzle in found else 'cannot make 24'}", _WANTED)
        found[puzzle] = int(rank)
    if not found:
        raise bad_file(path, "there is no puzzle", _WANTED)
    return tuple((rank, puzzle) for puzzle, rank in found.items())
