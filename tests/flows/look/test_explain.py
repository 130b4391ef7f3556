"""`turnwise explain STAGE --of RUN` names what a fingerprint differs in, whatever that is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from branching import Turnwise, finished_run, old, runs_of, turnwise
from hypothesis import given
from hypothesis import strategies as some

from flows import registry
from flows.look.explain import differing, fields
from stages.frame.contract import fingerprint
from stages.store.execute import INGREDIENTS
from stages.store.tracking import Tracking

__all__ = ["finished_run", "old", "turnwise"]  # fixtures

JSON = some.recursive(
    some.none() | some.booleans() | some.integers(0, 2) | some.sampled_from([0.0, 1.0, "", "a"]),
    lambda inner: (
        some.lists(inner, max_size=2) | some.dictionaries(some.sampled_from(["a", "b", "a.b"]), inner, max_size=2)
    ),
    max_leaves=4,
)
CONTENTS = some.fixed_dictionaries(
    {
        "stage": some.just("critic"), "version": some.integers(1, 2), "config": some.dictionaries(some.just("lr"), JSON),
        "shared": some.fixed_dictionaries({"model": some.dictionaries(some.sampled_from(["path", "url"]), JSON)}),
        "model": some.sampled_from(["m1", "m2"]), "inputs": some.dictionaries(some.just("collect"), some.lists(some.just("c1"), max_size=2)),
    }
)  # fmt: skip


@given(CONTENTS, CONTENTS)
def test_a_field_differs_exactly_where_the_fingerprint_does(one: Any, other: Any) -> None:
    assert bool(differing(fields(one), fields(other))) == (fingerprint(one) != fingerprint(other))


def explain(turnwise: Turnwise, run: Any, *options: str, stage: str = "critic") -> Any:
    return turnwise("explain", stage, "--of", run["run_id"], *options)


def test_a_stage_that_nothing_changed_for_is_reused_and_its_inputs_name_who_made_them(
    turnwise: Turnwise, old: Any
) -> None:
    told = explain(turnwise, old, "--iteration", "1")
    assert (told["reuse"], told["nearest"]) == (runs_of(old, 1)["critic"], None)
    (targets,) = told["inputs"]["targets"]
    assert targets == {
        "run_id": runs_of(old, 1)["targets"],
        "name": f"targets 1 of preset seed 0, in run {old['run_id'][:8]}",
    }
    assert told["fields"]["inputs.targets"] == [runs_of(old, 1)["targets"]]
    assert (told["fields"]["critic.lr"], told["fields"]["iteration"], told["fields"]["version"]) == (0.1, 1, 1)


def change_seed(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    return ("--set", "seed=7")


def change_config(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    return ("--set", "critic.lr=0.5")


def change_shared(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    return ("--set", "task.max_turns=3")


def change_version(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    return _changed_stage(monkeypatch, version=2)


def change_prompt(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    return _changed_stage(monkeypatch, roles=("successor",))


def change_model(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setattr("flows.workspace.model_hash", lambda run: "another")
    return ()


def change_environment(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setattr("stages.store.contents.code_hash", lambda module: "another")
    return ()


def _changed_stage(monkeypatch: pytest.MonkeyPatch, **values: Any) -> tuple[str, ...]:
    from dataclasses import replace

    load = registry.load_stage
    for module in ("flows.rerun", "flows.registry"):
        monkeypatch.setattr(f"{module}.load_stage", lambda name: replace(load(name), **values))
    return ()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_seed, "seed"),
        (change_config, "critic.lr"),
        (change_shared, "task.max_turns"),
        (change_version, "version"),
        (change_prompt, "prompts.successor"),
        (change_model, "model_hash"),
        (change_environment, "contents.task.env"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_each_kind_of_field_is_named_where_it_alone_changes(
    turnwise: Turnwise, old: Any, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], tuple[str, ...]], named: str
) -> None:
    told = explain(turnwise, old, "--iteration", "1", *change(monkeypatch))
    assert told["reuse"] is None
    assert told["nearest"]["run_id"] == runs_of(old, 1)["critic"]
    assert list(told["nearest"]["differs"]) == [named]


def test_another_input_is_named(turnwise: Turnwise, old: Any, home: Path) -> None:
    new = turnwise("rerun", "targets", "--of", old["run_id"], "--set", "targets.lr=0.5", "--through", "targets")
    made = runs_of(new, 2)["targets"]
    inputs = Tracking(home / "mlflow").artifact(runs_of(old, 2)["critic"], "inputs.json")
    kept = inputs.read_text()
    inputs.write_text(kept.replace(runs_of(old, 2)["targets"], made))
    inputs.with_name("sha256.json").unlink()  # its seal
    told = explain(turnwise, old)["nearest"]
    assert told["differs"] == {"inputs.targets": [[runs_of(old, 2)["targets"]], [made]]}


def test_of_a_run_that_kept_less_the_rest_is_compared_and_the_gap_told(
    turnwise: Turnwise, old: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (home / "mlflow").rglob(INGREDIENTS):
        file.unlink()
    change_model(monkeypatch)
    near = explain(turnwise, old, "--set", "critic.lr=0.5")["nearest"]
    assert list(near["differs"]) == ["critic.lr"]
    assert near["not_kept"] == ["model", "prompts", "contents"]
    _, out, _ = turnwise("explain", "critic", "--of", old["run_id"], "--set", "critic.lr=0.5", raw=True)
    assert "critic 2 runs: no finished run has its fingerprint." in out
    assert "critic.lr: 0.1 -> 0.5" in out
    assert "did not keep its model, prompts, contents" in out


def test_a_change_that_the_stage_does_not_read_is_refused(turnwise: Turnwise, old: Any) -> None:
    status, _, err = turnwise("explain", "critic", "--of", old["run_id"], "--set", "distill.lr=1", raw=True)
    assert status == 2
    assert "critic does not read 'distill'" in err


def test_what_a_run_keeps_is_what_its_fingerprint_is_the_hash_of(old: Any, home: Path) -> None:
    tracking = Tracking(home / "mlflow")
    for run_id in runs_of(old, 2).values():
        kept = json.loads(tracking.artifact(run_id, INGREDIENTS).read_text())
        assert fingerprint(kept) == tracking.tags(run_id)["fingerprint"]
