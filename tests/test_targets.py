"""The language Bellman backup against a table written by hand, and the two information sets.

The engine is scripted: every role's reply names what it was told, so a target says how it was made.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest

from stages import collect, refine, targets
from stages.frame.contract import Config, Outputs
from stages.frame.sections import RolesConfig, TaskConfig
from stages.frame.types import Message, MissingInput, Outcome, Request, TurnwiseError
from stages.llm.roles import Roles, load_roles
from stages.play.transitions import episode_rows, known_losses, transitions
from stages.targets import TargetsConfig, target_row

CHECK = ("Thought: t Action: check photo", "photo done.")
CLOSE = ("Action: close phone", "phone done. Mia audits: fail. gold needs close email.")
WON = ("Action: close email", "email done. Mia audits: pass.")
EPISODES: list[tuple[str, list[tuple[str, str]], Outcome, float, list[int]]] = [
    ("Lost", [CHECK, CLOSE], Outcome.SCORED, 0.0, []),
    ("Won", [WON], Outcome.SCORED, 1.0, []),
    ("Cut", [CHECK], Outcome.TRUNCATED, 0.0, []),
    ("Failed", [("mumble", "say again"), ("mumble", "not understood.")], Outcome.POLICY_FAILED, 0.0, [0, 1]),
    ("Broken", [CHECK], Outcome.ENV_FAILED, 0.0, []),
]


def field(prompt: str, name: str) -> str:
    """The last line of that name: the history has actions, too."""
    found: list[str] = re.findall(rf"^{name}: (.*)$", prompt, re.MULTILINE)
    assert found, prompt
    return found[-1]


def role_play(prompt: str, request: Request) -> str:
    asked, role = prompt.removesuffix("<assistant>\n"), models.role_of(prompt)
    if role == "policy":
        return "Thought: t Action: give discount"
    if role == "successor":
        return f"Future: F({field(asked, 'Action')} after {asked.count('Action:')} by {request.adapter})"
    if role == "combine":
        return f"Future: B({field(asked, 'Action')} | {field(asked, 'Then')} | {field(asked, 'Reward')} | {field(asked, 'Later')})"
    return f"{models.words_of(prompt).removeprefix('Rewrite.').strip()} corrected"


def bench_of(base: Path, tmp_path: Path, reply: Any = role_play, **roles: Any) -> models.Bench:
    bench = models.Bench(base, tmp_path, engine=models.Recorder(reply))
    bench.roles = RolesConfig(max_action_tokens=100, max_future_tokens=600, **roles)
    for i, (name, turns, outcome, reward, malformed) in enumerate(EPISODES):
        episode = models.make_episode(bench.engine, name, turns, outcome, reward=reward, malformed=malformed)
        bench.memory.keep(f"collect{i}", Outputs({}, episode_rows([episode], 0)))
    for run_id, folder in (("distill0", "target"), ("critic0", "adapter"), ("distill0", "adapter")):
        bench.memory.files[run_id, folder] = tmp_path / run_id / folder
    return bench


INPUTS = {"collect": [f"collect{i}" for i in range(5)], "critic": ["critic0"], "distill": ["distill0"]}
LATER = "Future: F(give discount after 2 by distill0-target)"
TABLE = {
    ("Lost", 0): f"Future: B(check photo | photo done. | none | {LATER})",
    ("Lost", 1): "Future: B(close phone | phone done. Mia audits: fail. gold needs close email. | 0 | none)",
    ("Won", 0): "Future: B(close email | email done. Mia audits: pass. | 1 | none)",
    ("Cut", 0): f"Future: B(check photo | photo done. | none | {LATER})",
    ("Failed", 1): "Future: B(unreadable | not understood. | 0 | none)",
}


def made(
    bench: models.Bench, inputs: dict[str, list[str]] = INPUTS, **config: Any
) -> dict[tuple[str, int], dict[str, Any]]:
    outputs = bench.run(targets.STAGE, TargetsConfig(**config), inputs)
    return {(row["episode_id"], row["turn"]): dict(row) for row in outputs.rows["targets"]}


def test_targets_equal_the_table(base: Path, tmp_path: Path) -> None:
    """Terminal: from reward and last observation alone. Truncated: bootstrapped. Mended replies: no target."""
    rows = made(bench_of(base, tmp_path))
    assert {key: row["raw"] for key, row in rows.items()} == TABLE
    assert {key: row["completion"] for key, row in rows.items()} == {
        key: f"{text} corrected" for key, text in TABLE.items()
    }
    assert {key: row["terminal"] for key, row in rows.items()} == {key: "none)" in text for key, text in TABLE.items()}
    assert {row["role"] for row in rows.values()} == {"successor"}


def test_combine_is_told_what_a_step_was_paid_before_the_end(base: Path, tmp_path: Path) -> None:
    """Three steps, cut short: the first and the last paid. Without pay the words are as they always were."""
    bench = bench_of(base, tmp_path)
    episode = models.make_episode(bench.engine, "Paid", [CHECK] * 3, Outcome.TRUNCATED)
    turns = tuple(replace(turn, reward=reward) for turn, reward in zip(episode.turns, (0.25, 0.0, 1.0), strict=True))
    bench.memory.keep("paid", Outputs({}, episode_rows([replace(episode, turns=turns)], 0)))
    rows = made(bench, {**INPUTS, "collect": ["paid"]})
    assert [rows["Paid", i]["raw"].split(" | ")[2] for i in range(3)] == ["0.25 now", "none", "1 now"]


def test_without_correction_the_combined_future_is_the_target(base: Path, tmp_path: Path) -> None:
    rows = made(bench_of(base, tmp_path), correct=False)
    assert {key: row["completion"] for key, row in rows.items()} == TABLE


@pytest.mark.parametrize("steps", [2, 9])
def test_real_steps_are_merged_from_the_last_to_the_first(base: Path, tmp_path: Path, steps: int) -> None:
    """Where the episode ends within the steps nothing is sampled: the future of its first action holds the real audit."""
    rows = made(bench_of(base, tmp_path), steps=steps)
    audit = f"{TABLE['Lost', 1]} corrected"
    assert rows["Lost", 0]["raw"] == f"Future: B(check photo | photo done. | none | {audit})"
    assert rows["Lost", 0]["info"]["next_action"] == ""
    assert not rows["Lost", 0]["terminal"]
    assert {key: row["raw"] for key, row in rows.items() if key != ("Lost", 0)} == {
        key: text for key, text in TABLE.items() if key != ("Lost", 0)
    }


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        (1, "B(check photo | photo done. | none | Future: F(give discount after 2 by distill0-target))"),
        (
            2,
            "B(check photo | photo done. | none | Future: B(check photo | photo done. | none | Future: F(give discount after 3 by distill0-target)) corrected)",
        ),
    ],
)
def test_after_its_real_steps_a_chain_goes_on_with_a_sampled_future(
    base: Path, tmp_path: Path, steps: int, wanted: str
) -> None:
    """Three turns, cut short: two real steps reach the state after the second, and pi and M_target take over there."""
    bench = bench_of(base, tmp_path)
    bench.memory.keep(
        "long",
        Outputs({}, episode_rows([models.make_episode(bench.engine, "Long", [CHECK] * 3, Outcome.TRUNCATED)], 0)),
    )
    assert made(bench, {**INPUTS, "collect": ["long"]}, steps=steps)["Long", 0]["raw"] == f"Future: {wanted}"


def test_a_chain_stops_before_a_reply_that_nobody_could_read(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path)
    turns = [CHECK, ("mumble", "say again"), CLOSE]
    bench.memory.keep(
        "mended",
        Outputs(
            {}, episode_rows([models.make_episode(bench.engine, "Mended", turns, Outcome.SCORED, malformed=[1])], 0)
        ),
    )
    rows = made(bench, {**INPUTS, "collect": ["mended"]}, steps=9)
    assert set(rows) == {("Mended", 0), ("Mended", 2)}
    assert rows["Mended", 0]["info"]["next_action"] == "give discount"


def test_the_bootstrapped_action_is_fresh_and_not_the_stored_one(base: Path, tmp_path: Path) -> None:
    """The stored next action of "Lost" is `close phone`; the successor is asked about `give discount`."""
    bench = bench_of(base, tmp_path)
    rows = made(bench)
    engine: Any = bench.engine
    asked = [
        field(engine.decode(r.prompt_ids), "Action")
        for r, _ in engine.produced(adapter="distill0-target", head="Predict.")
    ]
    assert len(asked) == 2
    prompts = [engine.decode(r.prompt_ids) for r, _ in engine.produced(adapter="distill0-target", head="Predict.")]
    assert all(p.rsplit("Action: ", 1)[1].startswith("give discount") and "close phone" not in p for p in prompts)
    assert {row["info"]["next_action"] for key, row in rows.items() if not row["terminal"]} == {"give discount"}


@pytest.mark.parametrize(("frozen", "judge"), [("adapter", "distill0-target"), ("base", None)])
def test_each_role_is_played_by_its_own_adapter(base: Path, tmp_path: Path, frozen: str, judge: str | None) -> None:
    """a' by the policy, f' by the target network; combine and corrector by the target's parameters or by the base."""
    bench = bench_of(
        base, tmp_path, frozen=frozen, policy_temperature=0.9, target_temperature=0.7, judge_temperature=0.1
    )
    made(bench)
    engine: Any = bench.engine
    by_role: dict[str, list[Request]] = {"policy": [], "successor": [], "combine": [], "corrector": []}
    for request in engine.requests:
        by_role[models.role_of(engine.decode(request.prompt_ids))].append(request)
    assert {role: len(asked) for role, asked in by_role.items()} == {
        "policy": 2,
        "successor": 2,
        "combine": 5,
        "corrector": 5,
    }
    assert {r.adapter for r in by_role["policy"]} == {"distill0-adapter"}
    assert {r.adapter for r in by_role["successor"]} == {"distill0-target"}
    assert {r.adapter for r in [*by_role["combine"], *by_role["corrector"]]} == {judge}
    assert {role: {r.temperature for r in asked} for role, asked in by_role.items()} == {
        "policy": {0.9},
        "successor": {0.7},
        "combine": {0.1},
        "corrector": {0.1},
    }
    assert len({(r.prompt_ids, r.seed) for r in engine.requests}) == len(engine.requests)


def test_before_the_first_critic_all_roles_are_the_base(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path)
    rows = made(bench, {"collect": INPUTS["collect"]})
    assert {r.adapter for r in bench.engine.requests} == {None}  # type: ignore[attr-defined]
    assert rows["Cut", 0]["raw"] == TABLE["Cut", 0].replace("distill0-target", "None")


@pytest.mark.parametrize(
    ("spoiled", "left"),
    [
        ("policy", {("Lost", 1), ("Won", 0), ("Failed", 1)}),
        ("successor", {("Lost", 1), ("Won", 0), ("Failed", 1)}),
        ("combine", set()),
        ("corrector", set()),
    ],
)
@pytest.mark.parametrize("how", ["garbage", "cut"])
def test_a_reply_that_cannot_be_read_drops_its_target_and_is_counted(
    base: Path, tmp_path: Path, spoiled: str, left: set[Any], how: str
) -> None:
    """A cut action may still be one; a cut future never is."""

    def reply(prompt: str, request: Request) -> str:
        role = models.role_of(prompt)
        good = role_play(prompt, request)
        return (
            good
            if role != spoiled
            else "mumble"
            if how == "garbage"
            else good + (" " if role == "policy" else " and on") * 200
        )

    bench = bench_of(base, tmp_path, reply)
    if not left:
        # Not one target is an engine that talks garbage: as a finished run it would be reused for ever.
        advice = (
            "Look at the engine's model"
            if how == "garbage"
            else "5 of them were cut at their limit: raise roles.max_future_tokens"
        )
        with pytest.raises(
            TurnwiseError, match=rf"futures of 5 transitions, but no reply could be read \(target: 5.*\. {advice}"
        ):
            bench.run(targets.STAGE, TargetsConfig(), INPUTS)
        return
    outputs = bench.run(targets.STAGE, TargetsConfig(), INPUTS)
    found = {(row["episode_id"], row["turn"]) for row in outputs.rows["targets"]}
    if (spoiled, how) == ("policy", "cut"):
        assert found == set(TABLE)
    else:
        assert found == left
        assert outputs.metrics["targets/dropped"] == 5 - len(left)


def test_the_row_keeps_both_information_sets_and_the_ids_of_the_engine(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path)
    engine: Any = bench.engine
    rows = made(bench)
    produced = {c.token_ids for c in engine.completions}
    asked = {r.prompt_ids for r in engine.requests}
    for key, row in rows.items():
        assert tuple(row["completion_ids"]) in produced
        assert engine.decode(row["completion_ids"]) == row["completion"]
        assert tuple(row["teacher_ids"]) in asked
        assert engine.decode(row["student_ids"]) == row["student_prompt"]
        system, *_, teacher = json.loads(row["teacher_prompt"])
        assert system == "Service desk."
        observation = dict(EPISODES_OBSERVATIONS)[key]
        assert observation in teacher
        assert observation not in row["student_prompt"]
        assert row["info"]["reward"] == (1.0 if key == ("Won", 0) else 0.0)


EPISODES_OBSERVATIONS = [((name, k), turn[1]) for name, turns, _, _, _ in EPISODES for k, turn in enumerate(turns)]


def test_no_transition_at_all_is_a_missing_input(base: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="targets needs transitions from collect"):
        made(bench_of(base, tmp_path), {"collect": ["collect4"]})


def desks() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    sizes = [("requests", 1, 8), ("tiers", 1, 6), ("steps", 2, 8), ("describe_tools", 0, 1), ("rules_seed", 0, 99)]
    return [{name: int(rng.integers(low, high + 1)) for name, low, high in sizes} for _ in range(12)]


@pytest.mark.parametrize("options", desks(), ids=lambda o: "-".join(map(str, o.values())))
def test_student_prompts_are_conversation_and_action_and_nothing_else(
    base: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Over random desks: each equals one built from the state alone, without audit, future, reward, critique."""
    bench = models.Bench(base, tmp_path, task=TaskConfig(options=options))
    bench.run(collect.STAGE, collect.CollectConfig(first_episodes=12), {})
    bench.memory.files["critic0", "adapter"] = bench.memory.files["critic0", "target"] = tmp_path
    inputs = {"collect": ["collect0"], "critic": ["critic0"]}
    found = bench.run(targets.STAGE, TargetsConfig(transitions=30), inputs).rows["targets"]
    refined = bench.run(refine.STAGE, refine.RefineConfig(states=20, yes_frac_max=1.0), inputs).rows["targets"]
    assert len(found) > 15
    assert len(refined) > 10
    by_key = {t.key: t for t in transitions(bench.memory, ["collect0"])}
    for row in found:
        t = by_key[row["episode_id"], row["turn"]]
        words: list[Message] = [{"role": "user", "content": f"Predict.\nAction: {t.action}"}]
        assert row["student_ids"] == list(bench.engine.encode([*t.state, *words]))
        for word in ("audits", "needs", "Future:", "Reward", "Optimality"):
            assert word not in row["student_prompt"]
    for row in refined:
        t = by_key[row["episode_id"], row["turn"]]
        assert row["student_ids"] == list(bench.engine.encode(t.state)) == list(t.prompt_ids)
        for word in ("audits", "needs", "Future:", "Reward", "Optimality", "Improve"):
            assert word not in row["student_prompt"]


class Told(Roles):
    """Roles whose successor is told something that it must not know."""

    leak = ""

    def words(self, role: str, **fields: str) -> str:
        return f"{super().words(role, **fields)}\n{self.leak}"


@pytest.mark.parametrize("leak", ["Mia audits: fail.", "Future: then Raj says pass."])
def test_a_planted_leak_in_the_student_prompt_raises_when_the_row_is_built(
    base: Path, tmp_path: Path, leak: str
) -> None:
    context = bench_of(base, tmp_path).context(Config(), {})
    roles = Told("x", load_roles("service_desk").templates)
    target_row(context, roles, models.make_backup(future="Future: then Raj says pass."))
    object.__setattr__(roles, "leak", leak)
    with pytest.raises(AssertionError, match="only the teacher may know"):
        target_row(context, roles, models.make_backup(future="Future: then Raj says pass."))


def test_the_newest_loss_of_a_transition_counts(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path)
    for i, loss in enumerate((9.0, 0.5)):
        bench.memory.keep(
            f"critic{i}", Outputs({}, {"priorities": [{"episode_id": "Cut", "turn": 0, "loss": loss, "step": 0}]})
        )
    assert known_losses(bench.memory, ["critic0", "critic1"]) == {("Cut", 0): 0.5}
    assert known_losses(bench.memory, []) == {}


def test_old_transitions_leave_the_replay(base: Path, tmp_path: Path) -> None:
    rows = made(bench_of(base, tmp_path), replay_size=3)
    assert set(rows) == {("Cut", 0), ("Failed", 1)}


def test_the_same_seed_makes_the_same_targets_and_another_seed_others(base: Path, tmp_path: Path) -> None:
    bench = models.Bench(base, tmp_path)
    bench.run(collect.STAGE, collect.CollectConfig(first_episodes=20), {})

    def rows(seed: int) -> list[Any]:
        return list(
            bench.run(targets.STAGE, TargetsConfig(transitions=10), {"collect": ["collect0"]}, seed=seed).rows[
                "targets"
            ]
        )

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)
