"""A config key that is gone, or that was added, leaves stored runs as they are: they are read, and keep their fingerprints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from flows import presets
from flows.registry import STAGES, load_stage
from stages.frame.contract import Config, Outputs, Retired, Stage, fingerprint, ingredients
from stages.frame.sections import WAYS, RolesConfig
from stages.frame.types import UsageError


class Before(Config):
    lr: float = 1e-4
    colour: str = "red"


class After(Config):
    RETIRED: ClassVar[Mapping[str, Retired]] = {"colour": Retired("red", "toy.paint")}

    lr: float = 1e-4


class Longer(Config):
    ADDED: ClassVar[Mapping[str, Any]] = {"size": 0}

    lr: float = 1e-4
    colour: str = "red"
    size: int = 3


def toy(config: Config) -> str:
    stage = Stage("toy", 1, type(config), inputs=(), roles=(), run=lambda context: Outputs({}), shared=())
    return fingerprint(
        ingredients(stage, config, shared={}, seed=0, iteration=0, prompt_hashes={}, model_hash="m", inputs={})
    )


def of(preset: str, stage: str, *sets: str) -> str:
    """Fingerprint of a stage of a preset, as `execute` makes it, apart from prompts and files."""
    run, found = presets.load(preset, sets), load_stage(stage)
    shared = {name: getattr(run, name).counted(exclude=WAYS) for name in found.shared}
    parts: dict[str, Any] = {"prompt_hashes": {}, "model_hash": "m", "inputs": {"collect": ["a"]}}
    return fingerprint(ingredients(found, getattr(run, stage), shared=shared, seed=0, iteration=1, **parts))


def test_a_config_without_the_key_has_the_fingerprint_of_one_with_its_old_default() -> None:
    assert toy(After()) == toy(Before())
    assert toy(After(lr=1e-3)) == toy(Before(lr=1e-3)) != toy(After())
    assert toy(After()) != toy(Before(colour="blue"))


def test_an_added_key_counts_only_where_it_has_another_value_than_the_one_of_before() -> None:
    """Whatever its default is by now."""
    assert toy(Longer(size=0)) == toy(Before())
    assert len({toy(Longer()), toy(Longer(size=4)), toy(Before())}) == 3
    assert of("desk+gigpo", "grpo") != of("desk+grpo", "grpo")
    assert of("desk+grpo", "grpo", "grpo.gamma=0.5") != of("desk+grpo", "grpo")
    assert of("desk", "critic", "roles.oracle=evaluator") != of("desk", "critic")


def test_every_added_key_is_one_of_its_section_and_its_value_is_valid() -> None:
    added = {}
    configs = {name: load_stage(name).config for name in STAGES} | {"roles": RolesConfig}
    for name, config in configs.items():
        for key, value in config.ADDED.items():
            added[name, key] = config(**{key: value}).model_dump(mode="json")[key] == value
    assert added and all(added.values())


@pytest.mark.parametrize(
    ("preset", "stage", "before"),
    [
        ("desk+self_ac", "self_ac", "8016564b28032bd5726ad353b6a97cdbe7d4784c663f9a2507a5ba49d09de5e3"),
        ("math+self_ac+qwen7b", "self_ac", "a3628064035468edec36a9401b7e206c92f361b4558c2c487f387ce9acb948f4"),
        ("20q+ppo+qwen7b", "self_ac", "847eddddb87c2e7fd874f1449bcb0255d73b132e40e0ca1ff1b59c34d7319d32"),
        ("desk+grpo", "grpo", "4f0fe5940c6af5a7b3091d76a0064caff29480f92771207e4f945cf62ae1475a"),
        ("desk", "critic", "a1f9e2285f17b0794810ff0573de5e92f64bf49dee3d010e05959d2f32281664"),
        ("desk", "distill", "945fc7145fd29f0ab192c6a7a354b33c519ff00cd416cac003a24fe68ed81cec"),
        ("desk+rft", "rft", "cf9a8a0a577493055644fac6424c957e51c275c7f4aaa56f0d9bef42427a088f"),
        ("desk+sac", "q_critic", "f195c3b5755d2cb40194c981956f90c19ceea2115c62a146501d72a81db4d9b9"),
    ],
)
def test_the_kernels_of_training_left_the_fingerprints_of_before(preset: str, stage: str, before: str) -> None:
    """The constants are of the code in which `self_ac.attention` was a key, and `model` had neither of its two."""
    assert of(preset, stage) == before
    assert of(preset, stage, "model.attention=sdpa", "model.kernels=fused") == before
    assert of(preset, stage, "model.lora_rank=5") != before


def test_a_stored_config_with_the_old_default_is_read_and_loses_the_key() -> None:
    stored = presets.resolve({}).model_dump(mode="json")
    stored["self_ac"]["attention"] = "sdpa"
    assert "attention" not in presets.resolve(stored).model_dump(mode="json")["self_ac"]


def test_another_value_of_the_key_is_refused_with_the_key_that_took_its_place() -> None:
    said = r"^self_ac: the key attention is gone; set model.attention in its place\.$"
    with pytest.raises(UsageError, match=said):
        presets.resolve({}, ["self_ac.attention=flex"])
    with pytest.raises(UsageError, match=r"'self_ac.atention'"):
        presets.resolve({}, ["self_ac.atention=flex"])
