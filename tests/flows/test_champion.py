"""The champion: what a scheduled run goes on from, when it is replaced, and what a kill in between leaves."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fakes import Stages, fake_stages

from flows import champion, presets
from flows.orchestration.launch import Launcher, launch_run
from flows.orchestration.recurring import next_sets
from flows.report import Display, ending
from flows.telling import Summary
from stages.frame.types import EngineUnavailable, UsageError
from stages.store import models
from stages.store.runs import NOTE
from stages.store.workspace import Workspace

FIRST = datetime(2026, 11, 20, 3, 0, tzinfo=UTC)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    with fake_stages(monkeypatch) as found:
        found.win_rates = {-1: 0.1} | {i: 0.1 + 0.1 * i for i in range(9)}
        found.won = lambda policy, i: policy is not None  # every adapter wins all, the base model nothing
        yield found


@pytest.fixture
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("flows.orchestration.launch.check_data", lambda run: None)
    text = "iterations = 2\nmethod = 'rft'\neach_run = 'champion'\nmatch_episodes = 30\n"
    (tmp_path / "nightly.toml").write_text(text)
    return str(tmp_path / "nightly.toml")


def go(preset: str, sets: list[str], workspace: Workspace) -> Summary:
    with Display(quiet=True) as display:
        return launch_run(presets.load(preset, sets), workspace, Launcher(workspace.home, None), display, sets=sets)


def night(preset: str, n: int, workspace: Workspace) -> Summary:
    """The run that is due in that night."""
    return go(preset, next_sets(preset, [], "champion", FIRST + timedelta(days=n), workspace), workspace)


def aliases(workspace: Workspace) -> dict[str, str]:
    (model,) = workspace.tracking._client.search_registered_models("name = 'nightly'")
    return {alias: str(number) for alias, number in model.aliases.items()}


def test_the_first_candidate_that_beats_the_base_model_is_the_champion_and_the_next_night_goes_on_from_it(
    preset: str, stages: Stages, workspace: Workspace
) -> None:
    first = night(preset, 0, workspace)
    assert first.match["promoted"] and first.match["against"] is None and first.match["scenarios"] == 30
    assert aliases(workspace) == {"champion": "1", "candidate": "1"}
    stages.calls.clear()
    second = night(preset, 1, workspace)
    assert [call for call in stages.calls if call[0] in ("collect", "rft")] == [
        (n, i) for i in (2, 3) for n in ("collect", "rft")
    ]
    assert second.iterations[1:3] != () and [row["runs"]["rft"] for row in second.iterations[1:3]] == [
        row["runs"]["rft"] for row in first.iterations[1:]
    ]
    assert stages.inputs["collect", 2] == {"rft": [first.final["adapter"]]}
    assert not second.match["promoted"]  # as good is not better
    assert aliases(workspace) == {"champion": "1", "candidate": "2"}
    night(preset, 2, workspace)
    # from the champion again, not the candidate
    assert stages.inputs["collect", 2] == {"rft": [first.final["adapter"]]}


def test_both_play_the_same_scenarios_which_have_chosen_neither(
    preset: str, stages: Stages, workspace: Workspace
) -> None:
    night(preset, 0, workspace)
    night(preset, 1, workspace)
    runs = {one.tags["part"]: one for one in workspace.tracking.runs("evaluate", 2)}
    seeds = {part: (one.tags["seed"], one.tags["iteration"]) for part, one in runs.items()}
    assert seeds["champion"] == seeds["candidate"]
    assert seeds["champion"][0] not in {one.tags["seed"] for one in workspace.tracking.runs("evaluate", 100)[2:-2]}


def test_a_better_candidate_takes_the_champions_place_and_the_run_says_why(
    preset: str, stages: Stages, workspace: Workspace
) -> None:
    first = night(preset, 0, workspace)
    old = first.final["adapter"]
    stages.won = lambda policy, i: policy is not None and (policy != old or i % 2 == 0)
    second = night(preset, 1, workspace)
    assert aliases(workspace) == {"champion": "2", "candidate": "2"}
    text = "promoted: on 30 scenarios the candidate wins 1.00 and version 1 0.50, difference +0.50 (95 % +0.3"
    data = workspace.tracking._client.get_run(second.run_id).data
    assert (
        text in data.tags[NOTE]
        and data.tags["champion"].startswith(text)
        and any(text in line for line in ending(second))
    )
    assert (data.metrics["match/candidate"], data.metrics["match/champion"], data.metrics["match/promoted"]) == (
        1,
        0.5,
        1,
    )
    assert data.metrics["match/difference_low"] > 0


def test_a_candidate_whose_lead_may_be_luck_is_not_promoted() -> None:
    champion_won, candidate_won = ({str(i): float(i in won) for i in range(20)} for won in ({0, 1, 2}, {2, 3, 4, 5}))
    found = champion.compared(champion_won, candidate_won)
    assert found["difference"] == pytest.approx(0.05) and found["difference_low"] < 0 and not found["promoted"]


def test_only_scenarios_that_both_played_count_and_too_few_promote_nothing() -> None:
    found = champion.compared({"a": 0.0, "b": 0.0, "c": 1.0}, {"b": 1.0, "c": 1.0, "d": 0.0})
    assert (found["scenarios"], found["candidate"], found["champion"]) == (2, 1.0, 0.5)
    assert champion.compared({"a": 0.0}, {"a": 1.0}) == {"promoted": False, "scenarios": 1}


def test_a_run_killed_between_its_evaluation_and_the_promotion_promotes_once_when_it_is_run_again(
    preset: str, stages: Stages, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = models.name_alias

    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    def kill_promotion(client: Any, version: models.Version, alias: str) -> None:
        (kill if alias == "champion" else given)(client, version, alias)

    sets = next_sets(preset, [], "champion", FIRST, workspace)
    client = type(workspace.tracking._client)
    for where, what, act in (  # before the verdict is kept; and after it, before the alias is set
        (client, "set_model_version_tag", kill),
        (models, "name_alias", kill_promotion),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, what, act)
            with pytest.raises(KeyboardInterrupt):
                go(preset, sets, workspace)
        assert "champion" not in aliases(workspace)
        stages.calls.clear()
    # the next night goes on with it
    assert next_sets(preset, [], "champion", FIRST + timedelta(days=1), workspace) == sets
    go(preset, sets, workspace)
    assert stages.calls == [] and aliases(workspace)["champion"] == "1"
    night(preset, 1, workspace)
    workspace.tracking._client.set_registered_model_alias("nightly", "champion", "2")  # by a person, say
    again = go(preset, sets, workspace)  # the first night once more
    assert again.match["promoted"] and again.match["against"] is None
    assert aliases(workspace)["champion"] == "2"  # what was decided once is not done twice


def test_a_night_that_was_stopped_is_gone_on_with_and_one_that_failed_of_itself_is_not(
    preset: str, stages: Stages, workspace: Workspace
) -> None:
    def next_seed() -> int:
        return presets.load(preset, next_sets(preset, [], "champion", FIRST + timedelta(days=3), workspace)).seed

    fresh = int((FIRST + timedelta(days=3)).timestamp())
    stopped = int(FIRST.timestamp())
    for error, wanted in (
        (KeyboardInterrupt(), stopped),
        (EngineUnavailable("down"), stopped),
        (ValueError("nan"), fresh),
    ):
        stages.raises["rft", 1] = error
        with pytest.raises(type(error)):
            go(preset, [f"seed={stopped}"], workspace)
        assert next_seed() == wanted
    go(preset, [f"seed={stopped}"], workspace)
    assert next_seed() == fresh


def test_a_champion_of_another_method_is_refused_with_a_way_out(
    preset: str, stages: Stages, workspace: Workspace
) -> None:
    first = night(preset, 0, workspace)
    sets = [f"goes_on_from={first.run_id}:1", "iterations=4", "method=grpo"]
    with pytest.raises(
        UsageError, match=r"has method = rft, but this one has grpo. Set the same value, or rename the preset"
    ):
        go(preset, sets, workspace)
    with pytest.raises(
        UsageError, match=r"wanted the first 6 of 4 iterations from run .*, but it finished 2. Name an earlier"
    ):
        go(preset, [f"goes_on_from={first.run_id}:5", "iterations=4"], workspace)
    with pytest.raises(UsageError, match="goes_on_from: string should match"):
        presets.load(preset, ["goes_on_from=yesterday"])


def test_a_run_of_another_kind_leaves_the_champion_alone(preset: str, stages: Stages, workspace: Workspace) -> None:
    night(preset, 0, workspace)
    sets = next_sets(preset, [], "new_seed", FIRST, workspace)
    assert sets == ["each_run=new_seed", f"seed={int(FIRST.timestamp())}"]
    summary = go(preset, [*sets, "rft.lr=0.3"], workspace)
    assert summary.match == {} and aliases(workspace)["champion"] == "1"
