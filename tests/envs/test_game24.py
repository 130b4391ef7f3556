"""game24: legality of steps, the reward, the truth, and which puzzles are in which split."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import DATA, needs

from stages import envs
from stages.envs.exact24 import Numbers, choices, numbers_of, quadruples, solvable, without
from stages.envs.game24 import Game24, Options, truth
from stages.frame.types import Malformed, Message, Scenario, Step, UsageError

CSV = DATA / "game24" / "24.csv"


def puzzle(*numbers: int) -> Scenario:
    return Scenario("game24", "train", "x", {"numbers": list(numbers)})


def play(*numbers: int, **options: Any) -> Game24:
    env = Game24(Options(**options))
    env.reset(puzzle(*numbers))
    return env


def act(action: str) -> Message:
    return {"role": "assistant", "content": f"Thought: because.\nAction: {action}"}


def said(env: Game24, action: str) -> str:
    return str(env.step(act(action)).messages[0]["content"])


def winning(numbers: Numbers) -> list[str]:
    """Expansions, each of the newest node, that end at 24."""
    found: list[str] = []
    while len(numbers) > 1:
        made = next(m for m in choices(numbers) if solvable(without(numbers, m) or ()))
        found.append(f"expand {len(found)}: {made}")
        numbers = without(numbers, made) or ()
    return found


def test_every_solvable_puzzle_can_be_won_and_its_solution_read_back() -> None:
    env = Game24(Options(show="new"))
    for numbers in quadruples():
        env.reset(puzzle(*numbers))
        for action in winning(numbers_of(numbers)):
            assert env.step(act(action)).reward == 0
        step = env.step(act("submit 3"))
        assert (step.reward, step.terminated, step.truncated, step.info) == (1.0, True, False, {"expansions": 3})


def test_a_game_reads_as_the_docstring_says() -> None:
    env = Game24(Options(expansions=4))
    assert env.reset(puzzle(8, 3, 8, 3))[0]["content"] == "Node 0 is 3 3 8 8. 4 expansions left.\nnode 0: 3 3 8 8"
    assert (
        said(env, "expand 0: 8 / 3 = 8/3")
        == "Node 1 is 8/3 3 8. 3 expansions left.\nnode 0: 3 3 8 8\nnode 1: 8/3 3 8 (8 / 3 = 8/3)"
    )
    assert said(env, "expand 1: 3 - 8/3 = 1/3").startswith("Node 2 is 1/3 8. 2 expansions left.")
    assert "dead end. 1 expansion left." in (text := said(env, "Expand 2 : 8*1/3=8/3")) and "node 3:" not in text
    assert said(env, "expand 2: 8 / 1/3 = 24").endswith("\nnode 4: 24 (8 / 3 = 8/3; 3 - 8/3 = 1/3; 8 / 1/3 = 24)")
    assert said(env, "expand 0: 3 + 3 = 6").startswith(
        "Not possible: no expansions are left, only a submission. 0 expansions left."
    )
    assert said(env, "submit 4") == "Node 4 is 24. You win."


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("expand 0: 8 + 5 = 13", "node 0 does not hold 8 and 5"),
        ("expand 0: 4 + 4 = 8", "node 0 does not hold 4 and 4"),
        ("expand 0: 4 + 6 = 11", "4 + 6 is 10, not 11"),
        ("expand 0: 8 / 6 = 1", "8 / 6 is 4/3, not 1"),
        ("expand 2: 4 + 6 = 10", "there is no node 2"),
        ("expand 1: 10 - 10 = 0", "node 1 does not hold 10 and 10"),
        ("expand 0: 8 / 0 = 8", "nothing can be divided by 0"),
        ("expand 0: 6 + 4 = 10", "that is node 1 already"),
        ("submit 7", "there is no node 7"),
    ],
)
def test_what_is_not_possible_is_told_and_changes_nothing(action: str, why: str) -> None:
    env = play(4, 6, 8, 8)
    shown = said(env, "expand 0: 4 + 6 = 10").removeprefix("Node 1 is 8 8 10. ")
    step = env.step(act(action))
    assert (step.reward, step.terminated, step.truncated) == (0.0, False, False)
    assert step.messages[0]["content"] == f"Not possible: {why}. {shown}"


MALFORMED = r"""go
expand
expand 0
expand 0: 4 + 6
expand 0: 4 ** 6 = 4096
expand 0: 8 // 6 = 1
expand x: 4 + 6 = 10
expand -1: 4 + 6 = 10
expand 0: 1.5 + 2 = 3.5
expand 0: 4 + 6 = 10 = 10
expand 0: 4 + 6 = 10 submit 1
expand 0: 8 + 1/0 = 8
expand 0: 4 + 6 = 1e1
expand ٠: 4 + 6 = 10
expand 0: 4444444 + 6 = 10
submit
submit -1
submit 12345
submit (4 + 8) * (8 - 6)"""


@pytest.mark.parametrize("action", [*MALFORMED.splitlines(), "expand 0: 4 + 6 = 10\nsubmit 1"])
def test_an_action_in_another_form_is_malformed(action: str) -> None:
    with pytest.raises(Malformed, match="use expand NODE"):
        play(4, 6, 8, 8).step(act(action))


@pytest.mark.parametrize("action", ["submit 0", "submit 1", "submit 3"])
def test_submitting_what_is_not_24_alone_loses(action: str) -> None:
    env = play(1, 1, 2, 12)
    for move in ("expand 0: 12 * 2 = 24", "expand 1: 1 + 1 = 2", "expand 2: 24 + 2 = 26"):
        said(env, move)
    step = env.step(act(action))
    assert (step.reward, step.terminated) == (0.0, True)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(act(action))


@pytest.mark.parametrize(
    ("text", "reward", "words"),
    [
        ("(4 + 8) * (8 - 6)", 1.0, "is 24"),
        ("(4 + 8) * (8 - 6) = 24", 1.0, "(8 - 6) is 24"),
        ("(4+8)*(8-6)=24", 1.0, "(8-6) is 24"),
        ("4 + 8 + 8 + 6 = 24", 0.0, "is 26"),
        ("(4 + 8) * (8 - 6) = 25", 0.0, "does not count"),
        ("(4 + 8) * (8 - 6) = 24 = 24", 0.0, "does not count"),
        ("4 + 8 + 8 + 6", 0.0, "is 26"),
        ("(4+8)*2", 0.0, "each once"),
        ("8 / (8 - 8)", 0.0, "divides by zero"),
        ("4 ** 6", 0.0, "between numbers"),
        ("(" * 190 + "4", 0.0, "no expression"),
        ("8.0 * 3", 0.0, "whole numbers"),
        ("8 " * 150, 0.0, "200 characters"),
    ],
)
def test_an_expression_may_be_submitted_where_that_is_allowed(text: str, reward: float, words: str) -> None:
    step = play(4, 6, 8, 8, expressions=True).step(act(f"submit {text}"))
    assert (step.reward, step.terminated) == (reward, True)
    assert words in step.messages[0]["content"]
    assert play(4, 6, 8, 8, expressions=True).step(act("submit 0")).reward == 0


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(quadruples()), st.randoms(use_true_random=False))
def test_truth_equals_what_the_game_still_allows(numbers: tuple[int, ...], rng: random.Random) -> None:
    """Random play with a tight budget: q is 1 exactly while the exact search over the env's own trees finds a win."""
    options = {"expansions": 4}
    env, actions = Game24(Options(**options)), list[str]()
    env.reset(puzzle(*numbers))
    for _ in range(4):
        assert env._tree is not None
        before = env._tree
        node = rng.randrange(len(before.nodes))
        moves = [f"{m}" for m in choices(before.nodes[node].numbers)] or ["1 + 1 = 2"]
        actions.append(f"expand {node}: {rng.choice([*moves, '1 + 1 = 3'])}")
        env.step(act(actions[-1]))
        after, judged = env._tree, truth(options, puzzle(*numbers), actions)
        assert judged.q == float(any(solvable(n.numbers) and len(n.numbers) - 1 <= after.left for n in after.nodes))
        assert judged.optimal == (not judged.cause) == (after.to_win < before.to_win)
    for i, n in enumerate(env._tree.nodes if env._tree else ()):
        judged = truth(options, puzzle(*numbers), [*actions, f"submit {i}"])
        assert judged.q == float(judged.optimal) == float([*n.numbers] == [24])


@pytest.mark.parametrize(
    ("actions", "options", "optimal", "q", "cause"),
    [
        (["expand 0: 4 + 8 = 12"], {}, True, 1, ""),
        (["expand 0: 8 * 8 = 64"], {}, False, 1, "4 6 64 cannot make 24."),
        (["expand 0: 4 + 8 = 13"], {}, False, 1, "4 + 8 is 12, not 13."),
        (["expand 0: 4 + 8 = 12", "expand 0: 8 / 8 = 1"], {}, False, 1, "there is a shorter way."),
        (["expand 0: 8 * 8 = 64", "expand 0: 4 + 8 = 12"], {"expansions": 3}, False, 0, "24 is out of reach."),
        (["submit 0"], {}, False, 0, "node 0 is 4 6 8 8, not 24."),
        (["submit (4 + 8) * (8 - 6)"], {"expressions": True}, True, 1, ""),
        (["expand 0: 4 + 8 = 12"], {"expressions": True}, False, 1, "there is a shorter way."),
    ],
)
def test_truth_says_what_is_wrong_with_an_action(
    actions: list[str], options: dict[str, Any], optimal: bool, q: float, cause: str
) -> None:
    judged = truth(options, puzzle(4, 6, 8, 8), actions)
    assert (judged.optimal, judged.q, judged.cause) == (optimal, q, cause)
    assert judged.broken[len(judged.broken) - bool(cause) :] == ((cause,) if cause else ())


def test_truth_of_an_unreadable_action_is_malformed() -> None:
    with pytest.raises(Malformed):
        truth({}, puzzle(4, 6, 8, 8), ["expand"])


def splits(**options: Any) -> dict[str, list[Scenario]]:
    return {split: envs.scenarios("game24", options, split, None, 0) for split in ("train", "validation", "test")}


def test_every_puzzle_is_in_one_split_and_carries_its_ways() -> None:
    found = splits()
    assert sorted(tuple(s.data["numbers"]) for some in found.values() for s in some) == sorted(quadruples())
    assert {split: len(some) for split, some in found.items()} == {"train": 807, "validation": 197, "test": 358}
    assert all(s.data["ways"] >= 1 for some in found.values() for s in some)
    assert {s.id for s in splits(split_seed=1)["test"]} != {s.id for s in found["test"]}
    assert len(envs.scenarios("game24", {}, "train", 2000, 0)) == 2000


@needs(CSV)
def test_the_published_puzzles_are_all_solvable_and_split_by_rank() -> None:
    found = splits(path=str(CSV))
    assert {split: len(some) for split, some in found.items()} == {"train": 1062, "validation": 100, "test": 100}
    assert {tuple(s.data["numbers"]) for some in found.values() for s in some} <= set(quadruples())
    # The paper's test set is rows 900 to 999, counted from 0, as they stand in the file.
    with CSV.open(newline="") as file:
        rows = [row["Puzzles"] for row in csv.DictReader(file)]
    # of the 1,362 that were published: all that can be solved (test_exact24.py), so the rest are known to be, too
    assert len(rows) == 1262
    assert {s.id for s in found["test"]} == {"-".join(sorted(row.split(), key=int)) for row in rows[900:1000]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("Rank,Puzzles\n1,1 1 4 6\n2,1 1 1 1\n", "line 3 cannot make 24"),
        ("Rank,Puzzles\n1,1 1 4\n", "line 2 has no rank"),
        ("", "there is no puzzle"),
        ("Rank,Puzzles\n1,1 1 4 6\n2,6 4 1 1\n", "line 3 comes twice"),
        ("Puzzles\n1 1 4 6\n", "line 2 has no rank"),
        ("Rank,Puzzles\n1,1 1 4 14\n", "1 to 13"),
    ],
)
def test_a_bad_puzzle_file_is_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "puzzles.csv"
    path.write_text(content)
    with pytest.raises(UsageError, match=said) as caught:
        splits(path=str(path))
    assert "puzzles.csv" in str(caught.value)
    with pytest.raises(UsageError, match="cannot read"):
        splits(path=str(tmp_path / "none.csv"))


def test_equal_play_gives_equal_steps() -> None:
    def steps() -> list[Step]:
        env = play(4, 6, 8, 8)
        return [env.step(act(a)) for a in ("expand 0: 4 + 8 = 12", "expand 0: 8 - 6 = 2", "submit 1")]

    assert steps() == steps()


def test_after_the_last_reply_the_game_is_lost_whatever_the_replies_were() -> None:
    (first,) = envs.scenarios("game24", {}, "train", 1, 0)
    a, b = first.data["numbers"][:2]
    env = Game24(Options(replies=3))
    env.reset(first)
    steps = [
        env.step({"role": "assistant", "content": f"Action: {text}"})
        for text in (f"expand 0: {a} + {b} = {a + b}", "expand 7: 1 + 1 = 2")
    ]
    assert not any(step.terminated for step in steps)
    with pytest.raises(Malformed):  # no action yet
        env.step({"role": "assistant", "content": "hm"})
    last = env.step({"role": "assistant", "content": "Action: expand 7: 1 + 1 = 2"})
    assert (last.terminated, last.truncated, last.reward) == (True, False, 0.0)
    assert last.messages[0]["content"] == "That was the last reply, and nothing is submitted. You lose."
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step({"role": "assistant", "content": "Action: submit 0"})


def test_a_win_at_the_last_reply_is_a_win() -> None:
    env = Game24(Options(replies=4))
    env.reset(Scenario("game24", "train", "x", {"numbers": [1, 1, 1, 8], "ways": 1}))
    texts = ("expand 0: 1 + 1 = 2", "expand 1: 2 + 1 = 3", "expand 2: 3 * 8 = 24", "submit 3")
    steps = [env.step({"role": "assistant", "content": f"Action: {text}"}) for text in texts]
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0, 1.0]
