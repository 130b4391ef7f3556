"""Replies as turns: where a chain of thought is cut, what its turns carry, and that what learns from turns learns from
these.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import models
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from flows import presets
from stages import envs, grpo, rft, self_ac
from stages.corpora.tokenizers import byte_tokenizer
from stages.frame.contract import Config, Outputs
from stages.frame.sections import TaskConfig
from stages.frame.types import Completion, Episode, Message, Outcome, Request, Row, Scenario, Turn, UsageError
from stages.grpo import GrpoConfig
from stages.learn.episode_row import EpisodeIds, unbroken
from stages.llm.roles import Roles
from stages.llm.scripted import END_ID, ScriptedEngine, log_prob
from stages.play.agents import cut_at_blank_lines, turns_of
from stages.play.rollout import RolloutSettings, rollout, rollout_settings
from stages.play.transitions import episode_rows, transitions
from stages.rft import RftConfig
from turnwise.commands.show import transcript

ROLES = Roles("toy", {"policy": ""})
COT = RolloutSettings(
    adapter=None, temperature=1.0, max_tokens=400, max_turns=4, malformed_allowance=1, slots=8, attempts=3, seed=5,
    agent="cot",
)  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (["A", "\n\n", "B", ""], [["A", "\n\n"], ["B", ""]]),
        (["A", "\n", "\n", "B"], [["A", "\n", "\n"], ["B"]]),
        (["A", "\n", " \t ", "\n", "B"], [["A", "\n", " \t ", "\n"], ["B"]]),
        (["A.\n\n", "B"], [["A.\n\n"], ["B"]]),
        (["A", "\n\nThe", " end"], [["A", "\n\nThe"], [" end"]]),
        (["A\n", "\nB", "C"], [["A\n", "\nB"], ["C"]]),
        (["A", "\n\n", "\n", "  ", "\n\n", "B"], [["A", "\n\n", "\n", "  ", "\n\n"], ["B"]]),
        (["A\n\nB\n\n", "C"], [["A\n\nB\n\n"], ["C"]]),
        (["A\n\n", "\n\nB", "C"], [["A\n\n"], ["\n\nB", "C"]]),
        (["A", "\n", "B", "\n", "C"], [["A", "\n", "B", "\n", "C"]]),
        (["\n\n", "A", "\n\n", "B"], [["\n\n", "A", "\n\n"], ["B"]]),
        (["\n\nA", "B"], [["\n\nA", "B"]]),
        (["A", "\n\n", ""], [["A", "\n\n", ""]]),
        (["A", "\n\n", "B", "\n\n", "\n", ""], [["A", "\n\n"], ["B", "\n\n", "\n", ""]]),
        (["\n\n", " ", ""], [["\n\n", " ", ""]]),
        ([""], [[""]]),
        ([], []),
        (["A\r\n", "\r\n", "B"], [["A\r\n", "\r\n"], ["B"]]),
        (
            ["\ufffd", "\n\n", "\ufffd", "\ufffd"],
            [["\ufffd", "\n\n"], ["\ufffd", "\ufffd"]],
        ),  # bytes of a character, alone
    ],
    ids=repr,
)
def test_a_factor_ends_with_the_token_that_completes_a_blank_line(texts: list[str], parts: list[list[str]]) -> None:
    assert [texts[start:end] for start, end in cut_at_blank_lines(range(len(texts)), texts)] == parts


def test_a_text_is_wanted_for_each_token() -> None:
    with pytest.raises(ValueError, match="the text of each of 2 tokens, found 1"):
        cut_at_blank_lines([1, 2], ["a"])


VOCABULARY = [
    "", "\n", "\n\n", " ", "\t", "\r\n", "a", " b", "c.\n\n", "\n\nd", "e\n", "\nf", "g\n\nh", "i \n j", "\n \n",
    "k\n\n\n", "\ufffd",
]  # fmt: skip


def by_prefixes(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[tuple[int, int]]:
    """The slow twin: decodes every prefix anew and looks at its lines. A token that says something starts a factor
    where the factor before has a line of white space between two others, the first of which says something.
    """
    starts = [0]
    for i in range(1, len(ids)):
        said = decode(ids[starts[-1] : i]).lstrip().split("\n")
        if decode(ids[i : i + 1]).strip() and any(not line.strip() for line in said[1:-1]):
            starts.append(i)
    return [(start, [*starts, len(ids)][k + 1]) for k, start in enumerate(starts)] if ids else []


@settings(deadline=None)
@given(st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=25))
def test_factors_are_all_tokens_in_order_and_each_says_something(ids: list[int]) -> None:
    def decode(tokens: Sequence[int]) -> str:
        return "".join(VOCABULARY[token] for token in tokens)

    spans = cut_at_blank_lines(ids, [VOCABULARY[token] for token in ids])
    assert spans == by_prefixes(ids, decode)
    assert [token for start, end in spans for token in ids[start:end]] == ids
    assert all(decode(ids[start:end]).strip() for start, end in spans) or not decode(ids).strip()


@settings(deadline=None)
@given(st.text("ab. \n\t", max_size=30))
def test_where_a_token_is_a_character_factors_are_the_paragraphs(text: str) -> None:
    found = [text[start:end].strip() for start, end in cut_at_blank_lines(range(len(text)), text)]
    assert [one for one in found if one] == [one.strip() for one in re.split(r"\n[ \t]*\n", text) if one.strip()]


@settings(deadline=None)
@given(st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=25), st.booleans())
def test_turns_of_a_chain_carry_the_produced_ids_and_log_probs(ids: list[int], terminated: bool) -> None:
    """Every factor's prompt is the reply's prompt and all produced before it; the answer is the last one's alone."""
    done = Completion("whole", tuple(ids), tuple(-k / 7 for k in range(len(ids))), "length")
    reply = Turn(3, 5, (90, 91), done, "", "whole", "Right.", 1.0, terminated, not terminated, False, 2.0)
    *inner, last = turns_of("cot", reply, lambda tokens: "".join(VOCABULARY[t] for t in tokens))
    found = [*inner, last]
    assert sum((t.completion.token_ids for t in found), ()) == done.token_ids
    assert sum((t.completion.log_probs for t in found), ()) == done.log_probs
    for before, after in pairwise(found):
        assert after.prompt_ids == before.prompt_ids + before.completion.token_ids
    assert found[0].prompt_ids == (90, 91)
    assert [t.index for t in found] == list(range(3, 3 + len(found)))
    assert {t.state_len for t in found} == {5}
    assert {(t.reward, t.observation, t.terminated, t.truncated, t.completion.finish_reason) for t in inner} <= {
        (0.0, "", False, False, "cut")
    }
    assert (last.reward, last.observation, last.terminated, last.truncated) == (
        1.0,
        "Right.",
        terminated,
        not terminated,
    )
    assert last.completion.finish_reason == "length"
    assert sum(t.seconds for t in found) == pytest.approx(2.0)


def test_a_reply_stays_one_turn_where_it_has_no_ids_or_is_malformed_or_is_no_chain() -> None:
    done = Completion("a\n\nb", (6, 2, 6), (0.0, 0.0, 0.0), "stop")
    reply = Turn(0, 2, (9,), done, "", "a\n\nb", "x", 0.0, False, False, False, 1.0)
    decode: Callable[[Sequence[int]], str] = lambda tokens: "".join(VOCABULARY[t] for t in tokens)  # noqa: E731
    assert len(turns_of("cot", reply, decode)) == 2
    for same in (replace(reply, malformed=True), replace(reply, completion=Completion("a\n\nb", (), (), "stop"))):
        assert turns_of("cot", same, decode) == [same]
    assert turns_of("react", reply, decode) == [reply]


CHAIN = "Add.\n\n3 + 4 is 7.\n\n\\boxed{7}"
SUM = Scenario("math", "train", "sum", {"problem": "3 + 4", "answer": "7", "level": 1})


def solve(reply: str = CHAIN, **changes: Any) -> tuple[Episode, models.Recorder]:
    engine = models.Recorder(lambda prompt, request: reply)
    (episode,) = rollout(engine, envs.make_env("math", {}), [SUM], ROLES, replace(COT, **changes))
    return episode, engine


def test_a_problem_solved_in_three_thoughts_is_three_turns() -> None:
    episode, engine = solve()
    (request,), (done,) = engine.requests, engine.completions
    assert [t.completion.text for t in episode.turns] == ["Add.\n\n", "3 + 4 is 7.\n\n", "\\boxed{7}"]
    assert [t.action for t in episode.turns] == ["Add.", "3 + 4 is 7.", "\\boxed{7}"]
    assert [(t.reward, t.observation, t.terminated) for t in episode.turns] == [
        (0.0, "", False),
        (0.0, "", False),
        (1.0, "Right.", True),
    ]
    assert sum((t.completion.token_ids for t in episode.turns), ()) == done.token_ids
    assert episode.turns[-1].completion.token_ids[-1] == END_ID
    assert [t.prompt_ids for t in episode.turns] == [request.prompt_ids + done.token_ids[:n] for n in (0, 6, 19)]
    # The conversation holds the reply once, whole.
    assert [m["content"] for m in episode.messages[2:]] == [CHAIN, "Right."]
    assert (episode.outcome, episode.total_reward) == (Outcome.SCORED, 1.0)
    row = episode_rows([episode], 0)["episodes"][0]
    assert (row["n_turns"], row["n_tokens"]) == (3, len(CHAIN) + 1)


def test_an_unreadable_chain_is_one_turn() -> None:
    """math calls only an empty reply malformed; one is forgiven."""
    episode, _ = solve(" \n\n ")
    assert episode.outcome == Outcome.POLICY_FAILED
    assert [(t.malformed, len(t.completion.token_ids), t.terminated) for t in episode.turns] == [
        (True, 5, False),
        (True, 5, True),
    ]


def test_the_task_says_which_agent_it_is(base: Path, tmp_path: Path) -> None:
    bench = models.Bench(base, tmp_path, task=TaskConfig(env="math", agent="cot"))
    assert rollout_settings(bench.context(Config(), {}), None, seed=0).agent == "cot"
    assert TaskConfig().agent == "react"


def row_of(episode: Episode, final: Sequence[int]) -> EpisodeIds:
    turns = episode_rows([episode], 0)["turns"]
    (only,) = unbroken(turns, final, episode.outcome == Outcome.TRUNCATED, 1.0, (episode.id,))
    return only


def test_three_thoughts_become_a_row_of_three_actions_that_touch() -> None:
    episode, engine = solve()
    found = row_of(episode, engine.encode(episode.messages))
    n_prompt, lengths = len(episode.turns[0].prompt_ids), [6, 13, 10]
    assert [len(t.completion.token_ids) for t in episode.turns] == lengths
    assert found.action_start == (n_prompt, n_prompt + 6, n_prompt + 19)
    assert found.action_end == (n_prompt + 5, n_prompt + 18, n_prompt + 28)
    assert found.rewards == (0.0, 0.0, 0.0, 1.0)
    spoken = [found.ids[start : end + 1] for start, end in zip(found.action_start, found.action_end, strict=True)]
    assert spoken == [t.completion.token_ids for t in episode.turns]
    assert [tuple(map(log_prob, ids)) for ids in spoken] == list(found.old_log_probs)


def test_the_last_state_holds_the_verdict_only_where_the_reply_is_rendered_as_it_was_produced() -> None:
    """A template that drops white space renders other ids: then the row ends with what was produced."""
    episode, engine = solve()
    whole = row_of(episode, engine.encode(episode.messages))
    assert "Right." in engine.decode(whole.ids)
    assert whole.prefixes[-1] == len(whole.ids) > whole.action_end[-1] + 1
    padded, engine = solve(CHAIN + "\n")
    trimmed = [{**m, "content": m["content"].strip()} for m in padded.messages]
    found = row_of(padded, engine.encode(trimmed))
    assert found.ids == padded.turns[-1].prompt_ids + padded.turns[-1].completion.token_ids
    assert "Right." not in engine.decode(found.ids)
    assert (found.n_turns, found.rewards, found.truncated) == (3, (0.0, 0.0, 0.0, 1.0), False)


class Spoken(ScriptedEngine):
    """The script in byte pairs: a character may be several tokens, a token several characters."""

    def __init__(self, reply: str) -> None:
        super().__init__(lambda prompt, request: reply)
        self._tokenizer: Any = byte_tokenizer([CHAIN, "so it is.\n\nso it is", "\n\n\n"] * 9, 300)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(
            self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _completion(self, request: Request) -> Completion:
        text = self._reply("", request)
        ids = (*self._tokenizer(text, add_special_tokens=False).input_ids, self._tokenizer.eos_token_id)
        return Completion(text, ids, tuple(-i / 9 for i in range(len(ids))), "stop")


def test_thoughts_in_byte_pairs_are_cut_in_no_character_and_the_row_goes_on_to_the_verdict() -> None:
    thoughts = ["Zwölf, so it is.\n\n", "日本語 so.\n \n\n", "é 3 + 4\nis\n\n", "\\boxed{7}"]
    engine = Spoken("".join(thoughts))
    (episode,) = rollout(engine, envs.make_env("math", {}), [SUM], ROLES, COT)
    assert [t.completion.text for t in episode.turns] == thoughts
    assert max(len(t.completion.token_ids) for t in episode.turns) > 5
    found = row_of(episode, engine.encode(episode.messages))
    assert "Right." in engine.decode(found.ids)
    assert (found.n_turns, found.rewards) == (4, (0.0, 0.0, 0.0, 0.0, 1.0))


def chains(bench: models.Bench) -> list[Episode]:
    """Four episodes of one problem: right ones of 3 and 2 thoughts, wrong ones of 2 and 1. Kept as run collect0."""
    replies = iter([CHAIN, "Guess.\n\n\\boxed{8}", "It is\n\n\\boxed{7}", "\\boxed{9}"])
    bench.engine = models.Recorder(lambda prompt, request: next(replies))
    episodes = rollout(bench.engine, envs.make_env("math", {}), [SUM] * 4, ROLES, COT)
    assert [len(e.turns) for e in episodes] == [3, 2, 2, 1]
    bench.memory.keep("collect0", Outputs({}, episode_rows(episodes, 0)))
    return episodes


INPUTS: Mapping[str, Sequence[str]] = {"collect": ["collect0"]}


def produced(episodes: Sequence[Episode]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(t.prompt_ids, t.completion.token_ids) for e in episodes for t in e.turns]


def test_rft_learns_the_factors_of_the_wins(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = chains(bench)
    trained = models.capture(monkeypatch)
    metrics = bench.run(rft.STAGE, RftConfig(epochs=1), INPUTS).metrics
    assert sorted(trained) == sorted(produced([episodes[0], episodes[2]]))
    assert metrics["rft/wins"] == 5


def test_grpo_learns_every_factor_with_its_episode_s_advantage(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes = chains(bench)
    trained = models.capture(monkeypatch)
    seen: list[tuple[int, float]] = []
    real = grpo.step_batches

    def spy(*args: Any) -> Any:
        for (part,) in real(*args):
            seen.extend(zip(Counter(part.rows.row_K.tolist()).values(), part.advantage_R.tolist(), strict=True))
            yield [part]

    monkeypatch.setattr(grpo, "step_batches", spy)
    bench.run(grpo.STAGE, GrpoConfig(epochs=1, max_gap=1e9), INPUTS)
    assert sorted(trained) == sorted(produced(episodes))
    wanted = [(len(t.completion.token_ids), 1.0 if e.total_reward else -1.0) for e in episodes for t in e.turns]
    assert [(n, round(a, 3)) for n, a in sorted(seen)] == sorted(wanted)


def test_self_ac_learns_every_factor_with_an_advantage_of_its_own(bench: models.Bench) -> None:
    episodes = chains(bench)
    metrics = bench.run(
        self_ac.STAGE, self_ac.STAGE.config.model_validate({"epochs": 1, "lr": 0.01, "max_gap": 1e9}), INPUTS
    ).metrics
    assert (metrics["self_ac/rows"], metrics["self_ac/split"], metrics["self_ac/dropped"]) == (4, 0, 0)
    entries = pq.read_table(bench.memory.files["self_ac0", "ledger.parquet"]).to_pylist()
    found = {
        (e.id, t.index): [one for one in entries if one["episode"] == e.id and one["turn"] == t.index]
        for e in episodes
        for t in e.turns
    }
    for e in episodes:
        for t in e.turns:
            mine = found[e.id, t.index]
            assert [one["token_id"] for one in mine if one["in_action"]] == list(t.completion.token_ids)
            assert len({one["advantage"] for one in mine if one["in_action"]}) == 1
    assert len({next(one["advantage"] for one in mine if one["in_action"]) for mine in found.values()}) == 8


def test_transitions_of_a_chain_are_its_factors(bench: models.Bench) -> None:
    episodes = chains(bench)
    found = transitions(bench.memory, ["collect0"])
    assert [(tuple(t.prompt_ids), tuple(t.action_ids)) for t in found] == produced(episodes)
    assert [len(t.state) for t in found] == [2] * 8


def test_nlac_refuses_a_chain_of_thought_before_anything_runs() -> None:
    with pytest.raises(
        UsageError,
        match=r"task.agent: method nlac needs react, but found 'cot'. Set this value, or choose another method",
    ):
        presets.load("tiny", ["task.agent=cot"])
    for method in ("self_ac", "grpo", "rft"):
        assert presets.load("tiny", ["task.agent=cot", f"method={method}"]).task.agent == "cot"
    # What a stage of such a run stored has no method; a rerun reads it back.
    assert presets.resolve({"task": {"agent": "cot"}}).task.agent == "cot"


def test_factors_are_shown_as_parts_of_their_reply() -> None:
    episode, _ = solve()
    rows: dict[str, list[Row]] = episode_rows([episode], 0)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(
            transcript({"episode": rows["episodes"][0], "turns": rows["turns"], "judgements": [], "targets": []})
        )
    text = capture.get()
    assert [f"turn {k} (part {k + 1} of 3 of a reply)" in text for k in range(3)] == [True] * 3
    assert text.count("observation:") == 1
    assert "observation: Right." in text
    assert "part: 3 + 4 is 7." in text
    assert "3 + 4" in text.split("turn 0")[0]  # what the policy was told
