"""Presets: all of them load, and what is wrong is named together with what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from flows import presets
from flows.describe import SOURCE, describe
from flows.registry import METHODS, STAGES, WIRING, load_stage
from stages import envs
from stages.llm.roles import load_roles
from stages.types import UsageError


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_loads_with_an_environment_and_prompts_that_exist(name: str) -> None:
    run = presets.load(name)
    assert run.preset == name
    assert envs.scenarios(run.task.env, run.task.options, "train", 1, 0)
    assert load_roles(run.roles.prompts)


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
        (["ema_rate=1"], r"did you mean critic.ema_rate\?"),
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
    with pytest.raises(UsageError, match=r"no preset 'dmeo'; did you mean 'demo'\? Presets: demo"):
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
    assert described["inputs"] == ["targets", "collect", "refine", "distill", "critic"]
    assert next(one for one in described["config"] if one["key"] == "ema_rate")["source"].startswith("paper")
