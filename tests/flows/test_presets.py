"""Presets: all of them load, and what is wrong is named together with what would be right."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from shared_data import DATA

from flows import parts, presets
from flows.cost.estimate import estimate
from flows.cost.lengths import assumed
from flows.cost.workload import workload
from flows.registry import METHODS, STAGES, WIRING, load_stage
from stages import envs
from stages.envs import service_desk
from stages.frame.types import UsageError
from stages.judge.fresh import StatesConfig
from stages.llm.roles import roles_of
from stages.play.chains import DrawConfig
from stages.self_ac import check_options
from stages.train.model import MixedConfig
from turnwise.commands.describe import SOURCE, describe

# Option of an environment that names fetched data -> where that lies among the tests' own.
FETCHED = {
    "data/tasks/math": DATA / "math500", "data/tasks/tau_bench": DATA / "tau_bench", "data/tasks/wiki_search": DATA / "wiki",
    "data/tasks/game24/24.csv": DATA / "game24" / "24.csv", "data/tasks/twenty_questions/things_objects.csv": DATA / "twenty_questions" / "things_objects.csv",
}  # fmt: skip


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_loads_with_an_environment_and_prompts_that_exist(name: str) -> None:
    run: Any = presets.load(name)
    assert run.preset == name
    roles = roles_of(run.roles)
    assert set(roles.templates) >= {role for stage in METHODS[run.method] for role in load_stage(stage).roles}
    options = {
        key: str(FETCHED.get(value, value)) if isinstance(value, str) else value
        for key, value in run.task.options.items()
    }
    if missing := [path for path in options.values() if str(path).startswith(str(DATA)) and not Path(path).exists()]:
        pytest.skip(f"{missing[0]} is not there; TURNWISE_DATA names the folder of the task data")
    for split in ("train", "validation"):
        assert envs.scenarios(run.task.env, options, split, 1, 0), split
    assert envs.scenarios(run.task.env, options | run.evaluate.test_options, "test", 1, 0)


LIMIT = {"tau_bench": "max_steps", "wiki_search": "replies", "game24": "replies", "twenty_questions": "questions"}


@pytest.mark.parametrize("name", [name for name in presets.names() if presets.load(name).task.env in LIMIT])
def test_the_task_s_own_limit_ends_an_episode_before_the_rollout_cuts_it_short(name: str) -> None:
    """Unreadable replies, which the environments do not count, included."""
    task: Any = presets.load(name).task
    options = importlib.import_module(f"stages.envs.{task.env}").OPTIONS(**task.options)
    own = getattr(options, LIMIT[task.env])
    assert 0 < own <= task.max_turns - task.malformed_allowance


@pytest.mark.parametrize("name", [name for name in presets.names() if presets.load(name).task.env == "service_desk"])
def test_a_visit_of_the_desk_is_over_before_the_rollout_cuts_it_short(name: str) -> None:
    task: Any = presets.load(name).task
    steps = service_desk.steps_of(service_desk.Options(**task.options))
    assert len(steps) <= task.max_turns - task.malformed_allowance


EVEN = {
    "td1": {"advantage"}, "mc": {"advantage"}, "gae": {"advantage"}, "group": {"advantage"},
    "grpo": {"advantage", "alpha"}, "ppo": {"advantage", "separate"},
}  # fmt: skip


@pytest.mark.parametrize("arm", EVEN)
def test_arms_on_even_terms_differ_in_what_their_name_says_and_in_nothing_else(arm: str) -> None:
    """From Self-AC with the slides' advantage: draws, groups, scale, price, steps and rates are the same."""
    plain: Any = presets.load("desk+self_ac_td_mean").model_dump(exclude={"preset"})
    found: Any = presets.load(f"desk+self_ac_{arm}").model_dump(exclude={"preset"})
    ours, theirs = plain.pop("self_ac"), found.pop("self_ac")
    assert found == plain
    assert {key for key in ours if ours[key] != theirs[key]} == EVEN[arm]
    assert theirs["advantage"] == {"grpo": "group", "ppo": "gae"}.get(arm, arm)
    assert theirs["advantage_scale"] == "batch" and plain["collect"]["group"] > 1


LARGE = [name for name in presets.names() if parts.model_of(parts.find(name).model)[0] == "large"]
PAPER = [name for name in LARGE if presets.load(name).method == "nlac"]


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_s_presets_take_its_gradient_steps_with_its_settings(name: str) -> None:
    run: Any = presets.load(name)
    for yes in (0.0, 0.5, 0.8, 1.0):
        assert sum(work.steps for work in workload(run, assumed(run, [f"yes={yes}"]))) == 30_720
    for stage in (run.critic, run.distill):
        # the embedded model's rows are no general ones
        assert stage.general_rows > 0 and stage.general_path == "data/general.jsonl"
    assert (run.refine.futures, run.refine.refinements, run.targets.steps, run.refine.gate, run.distill.kl_coef) == (
        1,
        1,
        1,
        "none",
        0,
    )
    assert run.roles.frozen == "adapter"
    assert run.model.path == ("Qwen/QwQ-32B" if name.endswith("+qwq32b") else "Qwen/Qwen2.5-7B-Instruct")
    assert (run.roles.max_thought_tokens > 0) == name.endswith("+qwq32b")


@pytest.mark.parametrize("name", presets.names())
def test_presets_of_nlac_for_large_models_draw_by_the_episode_and_others_by_the_turn(name: str) -> None:
    run: Any = presets.load(name)
    drawn = {getattr(run, stage).draw for stage in METHODS[run.method] if hasattr(getattr(run, stage), "draw")}
    assert drawn <= {"episode" if name in PAPER else "turn"}


@pytest.mark.parametrize("name", presets.names())
def test_the_target_network_follows_the_steps_of_critic_and_distill_alike(name: str) -> None:
    run: Any = presets.load(name)
    assert run.critic.ema_rate == run.distill.ema_rate


def test_the_paper_s_presets_are_all_there() -> None:
    tasks = ("tau_retail", "tau_airline", "20q", "math")
    assert set(PAPER) == {f"{task}+qwen7b" for task in tasks} | {f"{task}+qwq32b" for task in TASKS}


TASKS = ("20q", "math", "tau_retail")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("baseline", ["rft", "grpo_long", "ppo_long"])
def test_the_baselines_take_the_paper_s_gradient_steps(baseline: str, task: str) -> None:
    run: Any = presets.load(f"{task}+{baseline}+qwen7b")
    assert sum(work.steps for work in workload(run, assumed(run))) == 30_720
    assert sum(work.stage == "evaluate" for work in workload(run, assumed(run))) == 3 + 6  # as often as NLAC's


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("baseline", ["rft", "grpo", "ppo"])
def test_the_baselines_play_as_many_episodes_as_nlac_on_the_same_task(baseline: str, task: str) -> None:
    run: Any = presets.load(f"{task}+{baseline}+qwen7b")
    nlac: Any = presets.load(f"{task}+qwen7b")
    played = [sum(work.episodes for work in workload(one, assumed(one))) for one in (run, nlac)]
    assert played[0] == played[1]
    assert (run.task, run.roles, run.model.path) == (nlac.task, nlac.roles, nlac.model.path)
    assert run.evaluate.model_copy(update={"audit_turns": 0}) == nlac.evaluate.model_copy(update={"audit_turns": 0})


@pytest.mark.parametrize("name", [f"{task}+ppo{long}+qwen7b" for long in ("", "_long") for task in TASKS])
def test_ppo_s_presets_have_a_critic_gae_and_a_ratio_by_token(name: str) -> None:
    run: Any = presets.load(name)
    assert (run.method, run.collect.group, run.self_ac.advantage, run.self_ac.ratio) == ("self_ac", 1, "gae", "token")
    assert run.self_ac.has_critic and run.self_ac.kl_coef == 0
    # A value model of its own wherever its activations fit, and then its layers cannot be worked out again.
    assert run.self_ac.separate != run.model.gradient_checkpointing == name.startswith("tau_retail")
    check_options(run.self_ac, checkpointing=run.model.gradient_checkpointing)
    assert all(line.startswith("fits") for line in estimate(run, "h100", 1)["verdict"])


@pytest.mark.parametrize("method", ["grpo", "ppo"])
@pytest.mark.parametrize("task", TASKS)
def test_the_paper_s_steps_are_each_on_new_episodes(method: str, task: str) -> None:
    """The two presets of a method differ in how long they run, and so in episodes; in nothing that a step does."""
    steps: Any = presets.load(f"{task}+{method}_long+qwen7b")
    episodes: Any = presets.load(f"{task}+{method}+qwen7b")
    assert (steps.self_ac, steps.model, steps.task) == (episodes.self_ac, episodes.model, episodes.task)
    assert steps.self_ac.epochs == 1 and steps.collect.episodes == 16 * steps.self_ac.batch


def test_grpo_s_presets_have_the_paper_s_groups_on_the_paper_s_tasks() -> None:
    for task in TASKS:
        name = f"{task}+grpo+qwen7b"
        run: Any = presets.load(name)
        nlac: Any = presets.load(name.replace("+grpo", ""))
        assert (run.method, run.collect.group, run.model, run.roles) == ("self_ac", 4, nlac.model, nlac.roles)
        assert (run.self_ac.has_critic, run.self_ac.advantage, run.self_ac.ratio, run.self_ac.kl_coef) == (
            False,
            "group",
            "token",
            0,
        )
        assert (run.task, run.iterations, run.collect.model_copy(update={"group": 1})) == (
            nlac.task,
            nlac.iterations,
            nlac.collect,
        )


@pytest.mark.parametrize("name", LARGE)
def test_large_presets_multiply_the_adapter_in_16_bits_in_passes_of_so_many_tokens(name: str) -> None:
    run: Any = presets.load(name)
    stages = [getattr(run, stage) for stage in METHODS[run.method] if hasattr(getattr(run, stage), "autocast")]
    assert stages
    assert all(stage.autocast and (getattr(stage, "row_tokens", 0) or stage.pass_tokens) for stage in stages)


def test_every_value_of_the_large_presets_says_where_it_is_from() -> None:
    """A comment behind it names the paper, the slides, the benchmark or us; what only names a place needs none."""
    places = (
        "path",
        "url",
        "oracle_url",
        "oracle_model",
        "prompts",
        "options",
        "extends",
        "domain",
        "test_options",
        "method",
    )
    files = [file for kind in parts.KINDS for file in parts.files(kind).values()]
    models = [name for name in parts.files("model") if parts.model_of(name)[0] == "large"]
    whole = (*models, "math", "tau_retail", "tau_airline")  # others have a part for large models
    for file in files:
        large = file.stem in whole
        for line in file.read_text().splitlines():
            if line.startswith("["):
                large = file.stem in whole or line.startswith("[large")
            key = line.partition(" = ")[0]
            if large and " = " in line and not line.startswith("#") and key not in places:
                assert re.search(r"# \[(paper|ours|slides|tau-bench)", line), f"{file.name}: {line}"


def test_the_demo_s_baselines_that_pick_draw_and_step_as_the_demo_does() -> None:
    """SAC but for what was tuned for it (studies/scalar.toml)."""
    demo: Any = presets.load("demo")
    refined = demo.refine.model_dump(include=set(StatesConfig.model_fields))
    for name in ("desk+nlql", "desk+sac"):
        run: Any = presets.load(
            name, ["q_critic.epochs=4", "q_critic.lr=2e-3", "pick.states=192"] if name == "desk+sac" else []
        )
        assert run.pick.model_dump(include=set(StatesConfig.model_fields)) == refined
        assert (run.collect, run.distill, run.iterations, run.task) == (
            demo.collect,
            demo.distill,
            demo.iterations,
            demo.task,
        )
        steps = [
            work.steps for work in workload(run, assumed(run, ["yes=0.5"])) if work.stage in ("critic", "q_critic")
        ]
        assert steps == [work.steps for work in workload(demo, assumed(demo)) if work.stage == "critic"]
    assert run.q_critic.model_dump(include=set(DrawConfig.model_fields)) == demo.targets.model_dump(exclude={"correct"})
    same = set(MixedConfig.model_fields) | {"epochs", "batch", "policy_rows", "ema_rate"}
    assert run.q_critic.model_dump(include=same) == demo.critic.model_dump(include=same)


@pytest.mark.parametrize(
    "sets",
    [["method=sac"], ["method=nlql", "pick.by=value"], ["method=hindsight"], ["refine.futures_of=episode"], ["method=nlql", "task.agent=cot"], ["method=nlrl"], ["method=nlql", "pick.futures_of=rollouts"]],
)  # fmt: skip
def test_a_method_with_a_key_that_it_cannot_use_is_one_sentence(sets: list[str]) -> None:
    with pytest.raises(
        UsageError,
        match=r"^[a-z_.]+: method \w+ needs \w+, but found '\w+'\. Set this value, or choose another method\.$",
    ):
        presets.load("demo", sets)


def test_a_preset_may_extend_several_and_the_last_one_wins(tmp_path: Path) -> None:
    for name, text in {
        "a": "iterations = 1\n[critic]\nlr = 0.5\nbatch = 3\n",
        "b": "[critic]\nlr = 0.25\n",
        "c": "[critic]\nepochs = 7\n",
    }.items():
        (tmp_path / f"{name}.toml").write_text(text)
    last = tmp_path / "last.toml"
    last.write_text(
        f"extends = [{', '.join(repr(str(tmp_path / f'{name}.toml')) for name in 'abc')}]\n[critic]\nepochs = 2\n"
    )
    run: Any = presets.load(str(last))
    assert (run.iterations, run.critic.lr, run.critic.batch, run.critic.epochs) == (1, 0.25, 3, 2)
    (tmp_path / "a.toml").write_text(f"extends = [{str(last)!r}]\n")
    with pytest.raises(UsageError, match="extend each other in a circle"):
        presets.load(str(last))


def test_a_preset_drops_what_it_inherits_and_sets_its_own_in_its_place(tmp_path: Path) -> None:
    """Options of another environment would be refused, and a table of TOML can only add to them."""
    file, last = tmp_path / "other.toml", tmp_path / "last.toml"
    file.write_text(
        'extends = "sums"\ndrops = ["task.options", "evaluate.win_words", "critic"]\n[task]\nenv = "game24"\n'
    )
    last.write_text('extends = "other.toml"\n[task.options]\nreplies = 3\n')
    run: Any = presets.load(str(file))
    plain: Any = presets.resolve({})
    assert (run.task.options, run.evaluate.win_words) == ({}, plain.evaluate.win_words)
    assert run.critic == plain.critic
    assert run.distill == presets.load("sums").distill  # type: ignore[attr-defined]
    assert presets.load(str(last)).task.options == {"replies": 3}
    assert presets.load(str(file), ["task.options.puzzles=9"]).task.options == {"puzzles": 9}


@pytest.mark.parametrize(
    ("drops", "said"),
    [
        ('"task.optoins"', "drops: it inherits no 'task.optoins'. Leave it out, or name a key"),
        ('["task.env.name"]', "drops: it inherits no 'task.env.name'"),
        ('""', "drops: it inherits no ''"),
        ("3", "drops wants a key, like task.options, or a list of them."),
    ],
)
def test_what_a_preset_cannot_drop_is_one_sentence(drops: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'extends = "demo"\ndrops = {drops}\n')
    with pytest.raises(UsageError, match=re.escape(said)):
        presets.load(str(file))


@pytest.mark.parametrize("name", presets.names())
def test_a_stored_config_reads_back_equal(name: str) -> None:
    run = presets.load(name)
    assert presets.resolve(run.model_dump(mode="json")) == run


def test_a_set_wins_over_the_toml_and_the_toml_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("iterations = 7\n[roles]\njudge_temperature = 0.25\n[critic]\nlr = 0.5\n")
    run = presets.load(str(file), ["critic.lr=1e-4", "task.options.tiers=2", "model.path=some/where"])
    assert (run.preset, run.iterations, run.roles.judge_temperature) == ("mine", 7, 0.25)
    assert run.critic.lr == 1e-4  # type: ignore[attr-defined]
    assert run.task.options == {"tiers": 2}
    assert run.model.path == "some/where"
    assert run.roles.policy_temperature == 1.0


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (["critic.lrr=1"], r"no key 'critic.lrr'; did you mean 'lr'\?"),
        (["crtic.lr=1"], r"no section or key 'crtic'; did you mean 'critic'\?"),
        (["ema_rate=1"], r"did you mean critic.ema_rate or q_critic.ema_rate or distill.ema_rate or sdpo.ema_rate\?"),
        (["critic.learning_rate=1"], r"no key 'critic.learning_rate'; did you mean 'lr'\?"),
        (["self_ac.learning_rate=1"], r"did you mean 'lr' or 'head_lr'\?"),
        (["critic.xyzzy=1"], r"no key 'critic.xyzzy'; it has lr, .*\.$"),
        (["critic.lr=fast"], r"critic.lr: .*number.* found 'fast'"),
        (["critic.lr=-1"], r"critic.lr: .*greater than 0; found '-1'"),
        (["method=ppo"], r"method: .*'nlac'.*found 'ppo'"),
        (["critic.lr"], r"wanted section.key=value"),
        (["preset.x=1"], r"'preset' is a value and has no keys"),
        (["critic=1"], r"critic: .*found '1'"),
        (["critic.lr.x=1"], r"critic.lr: .*number"),
    ],
)
def test_a_wrong_set_is_one_sentence(sets: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        presets.load("tiny", sets)
    assert "\n" not in str(caught.value)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no preset 'dmeo'; did you mean 'demo'\? See: turnwise presets"):
        presets.load("dmeo")


def test_a_missing_or_broken_preset_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no preset file .*none\.toml"):
        presets.load(str(tmp_path / "none.toml"))
    (tmp_path / "broken.toml").write_text("a = ")
    with pytest.raises(UsageError, match=r"broken\.toml is not readable TOML"):
        presets.load(str(tmp_path / "broken.toml"))


def test_every_stage_is_wired_and_declares_what_it_is_handed() -> None:
    assert set(WIRING) == set(STAGES)
    for name in STAGES:
        assert load_stage(name).name == name
        assert set(load_stage(name).inputs) == set(WIRING[name])
    assert all(stage in STAGES for chain in METHODS.values() for stage in chain)


def test_every_config_key_says_what_it_is_and_where_its_default_is_from() -> None:
    configs: list[type[BaseModel]] = [presets.RunConfig, *(load_stage(name).config for name in STAGES)]
    for config in configs:
        for key, info in config.model_fields.items():
            if not (isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)):
                assert info.description and SOURCE.search(info.description), f"{config.__name__}.{key}"


def test_stages_are_described_from_their_code() -> None:
    described = describe("critic")["stages"]["critic"]
    assert described["inputs"] == ["targets", "collect", "refine", "pick", "critic", "distill"]
    assert next(one for one in described["config"] if one["key"] == "ema_rate")["source"].startswith("paper")
