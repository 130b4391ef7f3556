"""The certificate of tokens against walks over token lists that share no code with it, with the rows that are trained
on, and with a real tokenizer.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from stages.learn.certificate import cert_metrics, certificates, shown, turn_gaps, with_gaps
from stages.learn.episode_row import first_turn, unbroken

BYTE_PAIRS = Path(__file__).parents[2] / "data" / "base_agents" / "tokenizer.json"


def turn(k: int, prompt: list[int], action: list[int], name: str = "e") -> dict[str, Any]:
    return {
        "episode_id": name,
        "turn": k,
        "prompt_ids": prompt,
        "action_ids": action,
        "log_probs": [-0.5] * len(action),
        "reward": 0.0,
    }


def letters(ids: Any) -> str:
    """Token 0 is a special one, which is not said; 7 and 8 look alike."""
    return "".join("" if i == 0 else "x" if i in (7, 8) else chr(97 + i) for i in ids)


def played(rng: random.Random) -> tuple[list[dict[str, Any]], list[int]]:
    """An episode of 1 to 5 turns, whose next states are changed at random places, or cut, in one of three cases."""
    turns, state = [], [rng.randrange(9) for _ in range(rng.randint(1, 4))]
    for k in range(rng.randint(1, 5)):
        action = [rng.randrange(9) for _ in range(rng.randint(1, 4))]
        turns.append(turn(k, state, action))
        state = [*state, *action, *(rng.randrange(9) for _ in range(rng.randint(0, 3)))]
        if rng.random() < 0.3:
            place = rng.randrange(len(state))
            state = (
                state[: max(place, 1)]
                if rng.random() < 0.5
                else [*state[:place], (state[place] + 1) % 9, *state[place + 1 :]]
            )
    return turns, state


def test_positions_are_those_of_a_walk_and_rows_are_cut_where_a_turn_is_not_carried_on() -> None:
    rng, broken = random.Random(0), 0
    for _ in range(300):
        turns, final = played(rng)
        found = certificates(turns, final, letters)
        assert [(row["episode_id"], row["turn"]) for row in found] == [("e", k) for k in range(len(turns))]
        for k, row in enumerate(found):
            mine = turns[k]["prompt_ids"] + turns[k]["action_ids"]
            after = final if k == len(turns) - 1 else turns[k + 1]["prompt_ids"]
            wrong = [t for t, token in enumerate(mine) if t >= len(after) or after[t] != token]
            assert (row["extended"], row["position"]) == (not wrong, wrong[0] if wrong else None)
            assert (row["produced"] is None, row["rendered"] is None) == (not wrong, not wrong)
        starts = [first_turn(row.key) for row in unbroken(turns, final, False, 1.0, ("e",))]
        assert starts == [0, *(row["turn"] + 1 for row in found[:-1] if not row["extended"])]
        broken += len(starts) > 1
    assert 50 < broken < 250


def test_the_tokens_around_the_difference_are_kept_as_text() -> None:
    (row,) = certificates([turn(0, [1, 2, 3, 4, 5], [6, 1, 2, 0])], [1, 2, 3, 4, 5, 6, 3, 3, 0, 4, 4], letters)
    assert (row["position"], row["produced"], row["rendered"]) == (
        6,
        ["d", "e", "f", "g", "b", "c", "<0>"],
        ["d", "e", "f", "g", "d", "d", "<0>", "e"],
    )
    assert shown(row["produced"]) == "'d|e|f|g|b|c|<0>'"


def test_tokens_that_look_alike_are_told_by_their_ids() -> None:
    (row,) = certificates([turn(0, [1], [7])], [1, 8], letters)
    assert (row["produced"], row["rendered"]) == (["<1>", "<7>"], ["<1>", "<8>"])


def test_a_next_state_that_ends_too_soon_differs_where_it_ends() -> None:
    (row,) = certificates([turn(0, [1], [2, 3])], [1, 2], letters)
    assert (row["extended"], row["position"], row["produced"], row["rendered"]) == (
        False,
        2,
        ["b", "c", "d"],
        ["b", "c"],
    )
    (nothing,) = certificates([turn(0, [1], [2])], [], letters)
    assert (nothing["position"], shown(nothing["rendered"])) == (0, "nothing")


def test_a_last_turn_whose_next_state_nobody_reads_is_not_judged() -> None:
    first, last = certificates([turn(0, [1], [2]), turn(1, [1, 2, 3], [4])], None, letters)
    assert (first["extended"], last["extended"], last["position"]) == (True, None, None)
    assert cert_metrics("grpo", [first, last], 0.1) == {
        "grpo/cert_turns": 1.0,
        "grpo/cert_broken": 0.0,
        "grpo/cert_gap_turns": 0.0,
    }


def test_a_reply_that_is_written_in_other_tokens_breaks_where_a_real_tokenizer_writes_them() -> None:
    """The engine spelled " * " and "left" out, which byte pairs would merge: the same text, another state."""
    tokenizer = Tokenizer.from_file(str(BYTE_PAIRS))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    prompt = "<|user|>\nUse 4 6 1 1.\n<|assistant|>\n"
    reply = "6 * 4 = 24 (left: 24 1 1)"
    rest = "\n<|user|>\nGo on.\n<|assistant|>\n"
    spelled = [i for character in reply for i in encode(character)]
    assert tokenizer.decode(spelled) == reply
    (row,) = certificates([turn(0, encode(prompt), spelled)], encode(prompt + reply + rest), tokenizer.decode)
    assert row["extended"] is False
    assert row["produced"][:4] == row["rendered"][:4]
    assert (row["produced"][4], row["rendered"][4]) == (" ", " * ")
    whole = encode(prompt + reply)[len(encode(prompt)) :]
    (kept,) = certificates([turn(0, encode(prompt), whole)], encode(prompt + reply + rest), tokenizer.decode)
    assert kept["extended"] is True


def test_gaps_are_means_over_the_tokens_of_each_turn() -> None:
    rng = random.Random(0)
    tokens = [(("e", rng.randrange(3)), -rng.random(), -rng.random()) for _ in range(60)]
    found = turn_gaps(*zip(*tokens, strict=True))
    assert len(found) == 3
    for key, gap in found.items():
        mine = [abs(old - new) for one, old, new in tokens if one == key]
        assert gap == pytest.approx({"gap_mean": sum(mine) / len(mine), "gap_max": max(mine)})


def test_turns_with_and_without_a_gap_are_counted() -> None:
    rows = certificates(
        [turn(0, [1], [2]), turn(1, [1, 2, 3], [4]), turn(2, [1, 2, 9, 9], [4])], [1, 2, 9, 9, 4], letters
    )
    found = with_gaps(
        rows,
        {
            ("e", 0): {"gap_mean": 0.3, "gap_max": 0.5},
            ("e", 2): {"gap_mean": 0.1, "gap_max": 0.7},
            ("f", 1): {"gap_mean": 9, "gap_max": 9},
        },
    )
    assert [row["gap_mean"] for row in found] == [0.3, None, 0.1]
    assert cert_metrics("self_ac", found, 0.1) == {
        "self_ac/cert_turns": 3, "self_ac/cert_broken": 1, "self_ac/cert_gap_turns": 2, "self_ac/cert_gap_mean": pytest.approx(0.2),
        "self_ac/cert_gap_max": 0.7, "self_ac/cert_gap_above": 1,
    }  # fmt: skip
