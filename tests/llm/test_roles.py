"""Roles: prompt files and their fields, what a student may see, hashes, and readers of the replies."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from string import Formatter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import ToyConfig, ToyRun

from flows import presets, registry
from flows.workspace import prompt_hashes
from stages.frame.contract import Context, Outputs, Stage
from stages.frame.sections import RolesConfig
from stages.frame.types import Malformed, Message, UsageError
from stages.llm.roles import (
    EVERYWHERE,
    FIELDS,
    FOLDER,
    ROLES,
    Roles,
    ask,
    check_student,
    history_text,
    load_roles,
    mix,
    parse_evaluation,
    parse_future,
    roles_of,
)
from stages.llm.scripted import ScriptedEngine
from stages.store.execute import execute, stage_fingerprint
from stages.store.workspace import Workspace

TASKS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
NLAC_TASKS = sorted(path.parent.name for path in FOLDER.glob("*/successor.md"))


STATE: list[Message] = [
    {"role": "system", "content": "Desk."},
    {"role": "user", "content": "Ana wants refund."},
    {"role": "assistant", "content": "Thought: I guess photo. Action: check photo"},
    {"role": "user", "content": "photo done."},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the prompts that a test may spoil."""
    return Path(shutil.copytree(FOLDER / "service_desk", tmp_path / "mine")).parent


@pytest.mark.parametrize("task", TASKS)
def test_every_role_of_every_task_has_a_prompt_that_fills_in(task: str) -> None:
    """NLAC's roles are there all or not at all."""
    roles = load_roles(task)
    assert sorted(roles.templates) == sorted(ROLES if task in NLAC_TASKS else EVERYWHERE)
    assert sorted(ROLES) == sorted(FIELDS)
    assert roles.policy([{"role": "system", "content": "x"}])
    for role in set(roles.templates) - {"policy"}:
        fields = {name: f"<{name} {{braces}} of the text stay>" for name in FIELDS[role]}
        *state, message = roles.prompt(role, STATE, **fields)
        assert message["role"] == "user"
        assert state == roles.policy(STATE)
        used = {name for _, name, _, _ in Formatter().parse(roles.templates[role]) if name}
        assert bool(used) == bool(FIELDS[role])
        assert all(fields[name] in message["content"] for name in used)


@pytest.mark.parametrize("task", NLAC_TASKS)
def test_the_evaluator_reads_the_futures_and_the_refiner_the_critique(task: str) -> None:
    templates = load_roles(task).templates
    for role, field in (
        ("evaluator", "futures"),
        ("refiner", "evaluation"),
        ("combine", "observation"),
        ("combine", "reward"),
        ("combine", "future"),
    ):
        assert f"{{{field}}}" in templates[role]


@pytest.mark.parametrize(
    "field", ["observation", "reward", "future", "futures", "evaluation", "text", "system", "history"]
)
@pytest.mark.parametrize("role", ["policy", "successor"])
def test_a_student_prompt_with_a_privileged_field_is_refused(folder: Path, role: str, field: str) -> None:
    (folder / "mine" / f"{role}.md").write_text(f"Say something.\n{{{field}}}\n")
    with pytest.raises(
        UsageError, match=rf"mine/{role}.md uses the field {{{field}}}, .* the conversation stands before"
    ):
        load_roles(str(folder / "mine"))


@pytest.mark.parametrize(
    "text",
    ["{history.secret}", "{}", "{0}", "{evaluation!r}", "{history} {evaluation}", "{action!r}", "{action:{thought}}"],
)
def test_other_spellings_of_a_field_are_refused_too(folder: Path, text: str) -> None:
    (folder / "mine" / "successor.md").write_text(text)
    with pytest.raises(UsageError, match="none of this role's"):
        load_roles(str(folder / "mine"))


def test_a_role_is_not_given_what_belongs_to_another(folder: Path) -> None:
    """The combine prompt has no critique: left in, it would fail only when the first target is made."""
    (folder / "mine" / "combine.md").write_text("{observation} {evaluation}")
    with pytest.raises(UsageError, match=r"combine.md uses the field {evaluation}"):
        load_roles(str(folder / "mine"))


def test_wrong_folders_files_and_braces_are_one_sentence(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no prompt folder named 'yours'. Known are .*service_desk.* path with a '/'"):
        load_roles("yours")
    with pytest.raises(
        UsageError,
        match=r"no prompt folder named './yours'. Known are .* path with a '/', like ./prompts, relative to ",
    ):
        load_roles("./yours")
    (folder / "mine" / "value.md").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"mine/value.md cannot be read as text in UTF-8"):
        load_roles(str(folder / "mine"))
    (folder / "mine" / "value.md").write_text("Judge.")
    (folder / "mine" / "successor.md").write_text("Answer as {json")
    with pytest.raises(UsageError, match=r"successor.md: .*write {{ and }} for braces") as caught:
        load_roles(str(folder / "mine"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("role", ROLES)
def test_policy_and_value_are_needed_everywhere_and_no_other_role(folder: Path, role: str) -> None:
    whole = load_roles(str(folder / "mine"))
    (folder / "mine" / f"{role}.md").unlink()
    if role in EVERYWHERE:
        with pytest.raises(UsageError, match=rf"roles.prompts: mine lacks {role}.md; add it to mine/"):
            load_roles(str(folder / "mine"))
    else:
        assert load_roles(str(folder / "mine")).hashes() == {
            other: h for other, h in whole.hashes().items() if other != role
        }


def fingerprint_of(stage: str, prompts: str, workspace: Workspace, **inputs: list[str]) -> str:
    run = presets.resolve({"roles": {"prompts": prompts}})
    there = replace(workspace, prompt_hashes=prompt_hashes)
    return stage_fingerprint(registry.load_stage(stage), run=run, inputs=inputs, iteration=0, workspace=there)


def test_one_s_own_prompts_are_a_path_from_the_project_folder_and_in_the_fingerprint_by_their_text(
    folder: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert load_roles("./mine").templates == load_roles("service_desk").templates

    def made() -> dict[str, str]:
        return {stage: fingerprint_of(stage, "./mine", workspace) for stage in ("collect", "targets")}

    before = made()
    (folder / "mine" / "combine.md").write_text("{observation} {reward} {future} {action} {thought}!")
    after = made()
    # collect prompts the policy alone
    assert {stage for stage in before if before[stage] != after[stage]} == {"targets"}
    (folder / "mine" / "combine.md").write_text(load_roles("service_desk").templates["combine"])
    assert made() == before


@pytest.mark.parametrize("task", sorted(set(TASKS) - set(NLAC_TASKS)))
def test_a_task_without_the_roles_of_nlac_runs_every_other_method(task: str, workspace: Workspace) -> None:
    for method in ("self_ac", "grpo", "rft", "sdpo"):
        for stage in (*registry.METHODS[method], "evaluate"):
            assert fingerprint_of(stage, task, workspace)
    for stage in ("targets", "refine"):
        with pytest.raises(
            UsageError,
            match=rf"{stage} prompts the role successor, which .*prompts/{task} has no file for; add successor.md to it",
        ):
            fingerprint_of(stage, task, workspace)


def test_evaluate_needs_the_critic_s_roles_where_there_is_a_critic_to_audit(workspace: Workspace) -> None:
    assert fingerprint_of("evaluate", "math", workspace, self_ac=["s1"])
    with pytest.raises(UsageError, match="evaluate prompts the role successor"):
        fingerprint_of("evaluate", "math", workspace, critic=["c1"])
    assert fingerprint_of("evaluate", "service_desk", workspace, critic=["c1"])


def test_a_stage_without_its_prompt_is_refused_before_it_is_a_run(workspace: Workspace) -> None:
    def never(context: Context) -> Outputs:
        raise AssertionError("it was started")

    stage = Stage("source", 1, ToyConfig, inputs=(), roles=("policy", "refiner"), run=never)
    run = ToyRun(roles=RolesConfig(prompts="math"))
    with pytest.raises(UsageError, match=r"roles.prompts: source prompts the role refiner, .*; add refiner.md to it"):
        execute(stage, run=run, inputs={}, iteration=0, workspace=replace(workspace, prompt_hashes=prompt_hashes))
    assert workspace.tracking.runs("source", 10) == []


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_has_the_prompts_that_its_method_needs(name: str) -> None:
    run = presets.load(name)
    there = roles_of(run.roles).templates
    assert {role for stage in registry.METHODS[run.method] for role in registry.load_stage(stage).roles} <= set(there)


def test_hashes_change_with_a_word_of_that_role_alone(folder: Path) -> None:
    before = load_roles(str(folder / "mine")).hashes()
    assert before == {role: hashlib.sha256((folder / "mine" / f"{role}.md").read_bytes()).hexdigest() for role in ROLES}
    (folder / "mine" / "combine.md").write_text((folder / "mine" / "combine.md").read_text().replace("Merge", "Join"))
    after = load_roles(str(folder / "mine")).hashes()
    assert {role for role in ROLES if before[role] != after[role]} == {"combine"}


def test_the_policy_prompt_is_the_conversation_with_its_instructions_in_the_system_message() -> None:
    messages: list[Message] = [{"role": "system", "content": "Desk."}, {"role": "user", "content": "hello {name}"}]
    assert Roles("x", {"policy": ""}).policy(messages) == messages
    assert Roles("x", {"policy": "\nThink {{first}}.\n"}).policy(messages) == [
        {"role": "system", "content": "Desk.\n\nThink {first}."},
        messages[1],
    ]
    assert messages[0]["content"] == "Desk."


def test_as_text_the_conversation_stands_in_the_one_message_without_the_thoughts() -> None:
    roles = Roles("x", {"policy": "Think {{first}}.", "successor": "Predict.\nAction: {action}\n"}, "text")
    assert roles.prompt("successor", STATE, action="close {phone}") == [
        {
            "role": "user",
            "content": "Desk.\n\nThink {first}.\nAna wants refund.\nAction: check photo\nphoto done.\n\n"
            "Predict.\nAction: close {phone}",
        }
    ]
    (message,) = roles.prompt("successor", STATE[1:2], action="a")  # a chat without a system message
    assert str(message["content"]).startswith("Ana wants refund.\n")


def test_history_hides_thoughts_and_the_system_message() -> None:
    messages: list[Message] = [
        {"role": "system", "content": "Secret orders."},
        {"role": "user", "content": "Ana wants refund."},
        {"role": "assistant", "content": "Thought: I guess photo. Action: check photo"},
        {"role": "user", "content": "photo done."},
        {"role": "assistant", "content": "no sense at all"},
        {"role": "tool", "content": "not understood."},
    ]
    assert (
        history_text(messages)
        == "Ana wants refund.\nAction: check photo\nphoto done.\nAction: unreadable\nnot understood."
    )


@given(thought=st.text(max_size=30).filter(lambda t: "action" not in t.lower()))
def test_no_thought_reaches_the_history(thought: str) -> None:
    said: list[Message] = [{"role": "assistant", "content": f"Thought: {thought}\nAction: close phone"}]
    assert history_text(said) == "Action: close phone"


@pytest.mark.parametrize("text", ["Future: then pass.", "  Future:then fail.", "Future: a\nb"])
def test_futures_that_can_be_read(text: str) -> None:
    assert parse_future(text) == text.strip()


@pytest.mark.parametrize("text", ["", "Future:", "Future:  \n", "then pass.", "The Future: x", "Optimality: Yes."])
def test_futures_that_cannot_be_read(text: str) -> None:
    with pytest.raises(Malformed, match="wanted 'Future: "):
        parse_future(text)


@pytest.mark.parametrize(
    ("text", "optimal"),
    [
        ("Optimality: Yes.", True),
        ("Optimality: No. refund may need check photo.", False),
        (" optimality:yes, it is", True),
        ("Optimality: NO", False),
    ],
)
def test_evaluations_that_can_be_read(text: str, optimal: bool) -> None:
    found = parse_evaluation(text)
    assert (found.optimal, found.text) == (optimal, text.strip())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Yes.",
        "Optimality:",
        "Optimality: Perhaps.",
        "Optimality: Yesterday",
        "Optimality: None",
        "I say Optimality: Yes",
    ],
)
def test_evaluations_that_cannot_be_read(text: str) -> None:
    with pytest.raises(Malformed, match="Optimality: Yes"):
        parse_evaluation(text)


def test_check_student_raises_on_a_planted_leak_and_on_nothing_else() -> None:
    student = "Predict.\nAna wants refund. photo done.\nAction: close phone"
    known = "Predict.\nAna wants refund. photo done.\nclose phone"
    check_student(student, known, ["Mia audits: fail.", ""])
    check_student(student, known, ["photo done."])  # the observation stood in the state before
    for leak in ("Mia audits: fail.", "Optimality: No.", "Future: then pass."):
        with pytest.raises(AssertionError, match="only the teacher may know"):
            check_student(f"{student}\n{leak}", known, ["x", leak])


def test_ask_gives_every_row_a_seed_of_its_own_and_keeps_the_order() -> None:
    engine = ScriptedEngine(lambda prompt, request: f"{prompt[-14:-12]} {request.seed}")
    prompts: list[list[Message]] = [[{"role": "user", "content": f"q{i}"}] for i in range(5)]
    found = ask(engine, prompts, role="policy", adapter=None, temperature=0.3, max_tokens=50, seed=7)
    assert [ids for ids, _ in found] == [engine.encode(p) for p in prompts]
    assert [r.seed for r in engine.requests] == [mix(7, i) for i in range(5)]
    assert len({r.seed for r in engine.requests}) == 5
    assert {(r.max_tokens, r.temperature, r.adapter, r.role) for r in engine.requests} == {(50, 0.3, None, "policy")}
    assert [c.text for _, c in found] == [f"{engine.decode(r.prompt_ids)[-14:-12]} {r.seed}" for r in engine.requests]
    assert ask(engine, [], role="policy", adapter=None, temperature=1.0, max_tokens=5, seed=0) == []
    assert engine.calls == 1


def test_mixed_seeds_are_fixed_numbers_of_63_bits_that_differ() -> None:
    assert mix("a", 1) == 2057769193037142695  # whatever the machine, whatever PYTHONHASHSEED
    seeds = {mix(a, b) for a in range(40) for b in range(40)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix(1, 23) != mix(12, 3)
