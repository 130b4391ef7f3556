"""A reasoning model's <think> part: nobody reads it but the model, no target holds it, and the policy's own actions
keep it for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models import Bench, Recorder, words_of

from stages import collect, refine, targets
from stages.collect import CollectConfig
from stages.frame.contract import Outputs
from stages.frame.react import opened_thought, thought_of, without_thought
from stages.frame.sections import RolesConfig, TaskConfig
from stages.frame.types import Completion, Malformed, Message, Request, SimulatorError
from stages.llm.pieces import leaked_piece
from stages.llm.roles import history_text, spoken, thought_opened
from stages.llm.scripted import END_ID, ScriptedEngine, play
from stages.play.environment import environment
from stages.refine import RefineConfig
from stages.targets import TargetsConfig

THOUGHT = "secret. Action: close secret"
OPENED = "<think>\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<think>a</think>\n\nFuture: x", "Future: x"),
        ("  <THINK>a</Think>Future: x", "Future: x"),
        ("opened in the prompt</think>\nFuture: x", "Future: x"),
        ("<think>a <think> b</think>Future: x", "Future: x"),
        ("<think></think>", ""),
        ("Future: x", "Future: x"),
        ("Future: x <think>late</think>", "Future: x <think>late</think>"),
        (" spaces stay ", " spaces stay "),
        ("", ""),
    ],
)
def test_the_part_in_front_goes_and_the_rest_stays(text: str, said: str) -> None:
    assert without_thought(text) == said


@pytest.mark.parametrize("text", ["<think>Action: go", "<think>", " <think> a <think>"])
def test_a_thought_without_an_end_is_malformed(text: str) -> None:
    with pytest.raises(Malformed, match="max_thought_tokens"):
        without_thought(text)


def test_a_thought_is_opened_by_the_template_only_at_the_end_of_the_prompt() -> None:
    engine = ScriptedEngine()
    assert opened_thought("<assistant>\n<think>\n") == OPENED
    assert opened_thought("<think>a</think><assistant>\n") == ""
    assert thought_opened(engine.decode, [*b"a long prompt, then <think>\n"]) == OPENED
    assert thought_opened(engine.decode, ()) == ""


@pytest.mark.parametrize(
    ("opened", "text", "kept"),
    [
        ("", "<think>a</think>\n\nFuture: x", "Future: x"),
        (OPENED, "a</think>\n\nFuture: x", "</think>\n\nFuture: x"),
        (OPENED, "<think>a</think> Future: x", "</think> Future: x"),
        ("", "Future: x", "Future: x"),
    ],
)
def test_ids_and_log_probs_go_with_the_text(opened: str, text: str, kept: str) -> None:
    """Where the prompt opened the thought, its end tag stays: prompt and completion have an empty thought."""
    ids = (*text.encode(), END_ID)
    reply = Completion(text, ids, tuple(map(float, range(len(ids)))), "stop")
    found = spoken(reply, opened, ScriptedEngine().decode)
    assert found.text == "Future: x"
    assert found.token_ids == (*kept.encode(), END_ID)
    assert found.log_probs == reply.log_probs[-len(found.token_ids) :]
    assert found.finish_reason == "stop"


@pytest.mark.parametrize(("opened", "text"), [("", "<think>Future: x"), (OPENED, "Future: x")])
def test_an_unfinished_thought_says_nothing(opened: str, text: str) -> None:
    reply = Completion(text, tuple(text.encode()), (0.0,) * len(text), "length")
    assert spoken(reply, opened, ScriptedEngine().decode).text == ""


AGAIN = "the customer comes first"


def is_again(prompt: str) -> bool:
    """Whether it is the policy's prompt with a reply to be arrived at."""
    return words_of(prompt.removesuffix(OPENED)).startswith("Think.")


class Thinker(Recorder):
    """The scripted player of the desk, who thinks before every reply; with `opened` the template begins the thought.
    Asked to think again, it begins with `again`, and gives the reply that it was told unless there is one in it.
    """

    def __init__(self, opened: bool) -> None:
        self.opened, self.again = opened, f"{AGAIN}</think>\n\n"
        super().__init__(self.think)

    def think(self, prompt: str, request: Request) -> str:
        if is_again(prompt):
            told = play(prompt.removesuffix(OPENED), request) if self.again.endswith("\n\n") else ""
            return f"{'' if self.opened else '<think>'}{self.again}{told}"
        return f"{'' if self.opened else '<think>'}{THOUGHT}</think>\n\n{play(prompt.removesuffix(OPENED), request)}"

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (*super().encode(messages), *(OPENED.encode() if self.opened else b""))


@pytest.fixture(params=[False, True], ids=["tags of its own", "opened by the template"])
def bench(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> Bench:
    roles = RolesConfig(max_action_tokens=400, max_future_tokens=400, max_thought_tokens=100, judge_temperature=1.0)
    bench = Bench(
        base, tmp_path, engine=Thinker(request.param), task=TaskConfig(options={"requests": 2, "tiers": 2}), roles=roles
    )
    bench.run(collect.STAGE, CollectConfig(episodes=12, first_episodes=12), {}, name="collect0")
    return bench


def test_the_environment_and_the_critic_s_history_have_no_thought_and_the_turns_have_every_token(bench: Bench) -> None:
    engine = bench.engine
    assert isinstance(engine, Thinker)
    turns, episodes = (bench.memory.rows(table, ["collect0"]) for table in ("turns", "episodes"))
    produced = {c.token_ids for _, c in engine.produced()}
    assert turns and not any(turn["malformed"] for turn in turns)
    for turn in turns:
        assert tuple(turn["action_ids"]) in produced
        assert THOUGHT in turn["text"] and "secret" not in turn["action"] + turn["observation"]
    for episode in episodes:
        assert "secret" not in history_text(episode["messages"])
        assert any("secret" in str(m["content"]) for m in episode["messages"])  # it is the policy's own
    assert all(r.max_tokens == 500 for r in engine.requests)


@pytest.mark.parametrize("history", ["chat", "text"])
def test_no_target_and_no_role_s_words_hold_a_thought(bench: Bench, history: Any) -> None:
    """Earlier thoughts stand where the chat template leaves them in the policy's own prompt, and nowhere as text."""
    engine = bench.engine
    assert isinstance(engine, Thinker)
    bench.roles = bench.roles.model_copy(update={"history": history})
    before = len(engine.requests)
    bench.run(targets.STAGE, TargetsConfig(transitions=30), {"collect": ["collect0"]}, name="targets0")
    rows = bench.memory.rows("targets", ["targets0"])
    assert len(rows) == 30
    for row in rows:
        for key in ("completion", "raw", *(("student_prompt", "teacher_prompt") if history == "text" else ())):
            assert "secret" not in row[key], key
        text = engine.decode(row["completion_ids"])
        assert text.startswith("</think>\n\nFuture: " if engine.opened else "Future: ") and "secret" not in text
        assert row["completion_ids"][-1] == END_ID
        assert any(
            c.token_ids[-len(row["completion_ids"]) :] == tuple(row["completion_ids"]) for _, c in engine.produced()
        )
    asked = [engine.decode(r.prompt_ids) for r in engine.requests[before:]]
    assert not [prompt for prompt in asked if "secret" in words_of(prompt)]
    assert not [prompt for prompt in asked if history == "text" and "secret" in prompt and prompt.startswith("<user>")]


def refined(bench: Bench, **config: Any) -> Outputs:
    return bench.run(
        refine.STAGE, RefineConfig(states=30, yes_frac_max=1.0, **config), {"collect": ["collect0"]}, name="refine0"
    )


def rewritten_rows(bench: Bench) -> list[dict[str, Any]]:
    return [row for row in bench.memory.rows("targets", ["refine0"]) if not row["info"]["kept"]]


def test_a_rewritten_action_has_a_new_thought_that_knows_what_the_policy_knows(bench: Bench) -> None:
    """The row is one reply as produced; asked with the policy's prompt and the reply, and nothing of the critic's."""
    engine = bench.engine
    assert isinstance(engine, Thinker)
    before = len(engine.requests)
    metrics = refined(bench).metrics
    rows = rewritten_rows(bench)
    assert rows and metrics["refine/thoughts"] == len(rows)
    asked = [
        (engine.decode(r.prompt_ids), c.token_ids)
        for r, c in engine.produced()[before:]
        if is_again(engine.decode(r.prompt_ids))
    ]
    assert not [prompt for prompt, _ in asked if "Optimality" in prompt or "Future" in prompt]
    for row in rows:
        begin = row["student_prompt"].removesuffix(OPENED).removesuffix("<assistant>\n")
        assert any(
            prompt.startswith(f"{begin}<user>\nThink.\n{row['raw']}") and ids == tuple(row["completion_ids"])
            for prompt, ids in asked
        )
        assert thought_of(row["completion"]) == AGAIN
        assert row["completion"].endswith(row["raw"])
        text = engine.decode(row["completion_ids"])
        assert text == f"{'' if engine.opened else '<think>'}{AGAIN}</think>\n\n{row['raw']}"
        assert not leaked_piece(
            text, ["Future: then fail. It may need another action.", THOUGHT], row["student_prompt"], words=3
        )


@pytest.mark.parametrize(
    ("again", "reason"),
    [
        (f"{AGAIN}</think>\n\nThought: t Action: check diary", "another action"),
        (f"{AGAIN}</think>\n\nhm", "another action"),
        ("</think>\n\n", "no thought"),
        ("The other: another action may be needed.</think>\n\n", ""),
        ("The critic: optimality no, ANOTHER action may be needed.</think>\n\n", "leak in the thought"),
        (f"{AGAIN} {'and on ' * 90}</think>\n\n", "thought cut short"),
    ],
)
def test_a_row_whose_new_thought_cannot_be_learned_is_dropped_and_counted(
    bench: Bench, again: str, reason: str
) -> None:
    engine = bench.engine
    assert isinstance(engine, Thinker)
    engine.again = again
    metrics = refined(bench, leak_words=6).metrics
    dropped = [row["info"]["dropped"] for row in bench.memory.rows("judgements", ["refine0"]) if row["verdict"] == "no"]
    assert dropped and set(dropped) == {reason}
    assert metrics["refine/thought_leak"] == (len(dropped) if reason.startswith("leak") else 0)
    assert metrics["refine/thought_lost"] == (len(dropped) if reason and not reason.startswith("leak") else 0)
    assert bool(rewritten_rows(bench)) == (not reason)


def test_a_policy_that_does_not_think_is_not_made_to(bench: Bench) -> None:
    bench.engine = engine = Recorder()
    bench.run(collect.STAGE, CollectConfig(episodes=12, first_episodes=12), {}, name="collect0")
    metrics = refined(bench).metrics
    assert rewritten_rows(bench) and metrics["refine/thoughts"] == 0
    assert not any(is_again(prompt) for prompt in engine.prompts)


def test_without_thinking_again_a_kept_action_keeps_its_thought_and_a_rewritten_one_has_none(bench: Bench) -> None:
    engine = bench.engine
    assert isinstance(engine, Thinker)
    refined(bench, rethink=False)
    rows = bench.memory.rows("targets", ["refine0"])
    kept, rewritten = ([row for row in rows if row["info"]["kept"] is is_kept] for is_kept in (True, False))
    assert kept and rewritten
    for row in kept:
        assert any(c.token_ids == tuple(row["completion_ids"]) for _, c in engine.produced())
        assert "secret" in engine.decode(row["completion_ids"])
    for row in rewritten:
        assert "secret" not in engine.decode(row["completion_ids"]) + row["raw"] + row["completion"]
    for row in bench.memory.rows("judgements", ["refine0"]):
        assert row["verdict"] in ("yes", "no") and "secret" not in row["critique"] + "".join(row["futures"])


def test_a_thought_that_is_cut_short_is_no_action_although_it_names_one(bench: Bench) -> None:
    bench.roles = RolesConfig(max_action_tokens=len(THOUGHT), max_future_tokens=400)
    outputs = bench.run(collect.STAGE, CollectConfig(episodes=4, first_episodes=4), {}, name="cut")
    assert outputs.metrics["collect/malformed_frac"] == 1.0
    assert all("secret" not in history_text(e["messages"]) for e in bench.memory.rows("episodes", ["cut"]))


def test_whoever_answers_inside_the_environment_is_heard_without_a_thought(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.task = TaskConfig(env="twenty_questions", oracle="engine")
    heard = []
    monkeypatch.setattr("stages.envs.make_env", lambda env, options, ask, **_: heard.append(ask))
    monkeypatch.setattr(f"{__name__}.play", lambda prompt, request: "Yes.")
    environment(bench.context(CollectConfig(), {}))
    assert heard[0]([{"role": "user", "content": "Is it alive?"}]) == "Yes."
    bench.roles = RolesConfig(max_thought_tokens=0)
    environment(bench.context(CollectConfig(), {}))
    monkeypatch.setattr(f"{__name__}.THOUGHT", "secret " * 60)
    with pytest.raises(SimulatorError, match="max_thought_tokens"):
        heard[1]([{"role": "user", "content": "Is it alive?"}])
