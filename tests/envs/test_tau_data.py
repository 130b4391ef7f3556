"""tau_bench's data: splits, what is kept of a task, and one sentence for whatever is missing or broken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tau_small
from shared_data import DATA, needs
from tau_small import acted, customer, said

from stages import envs
from stages.frame.types import Message, Scenario, UsageError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tau_small.write(tmp_path_factory.mktemp("tau"))


def scenarios(path: str, split: str, **options: Any) -> dict[str, Scenario]:
    return {s.id: s for s in envs.scenarios("tau_bench", {"path": path} | options, split, None, 0)}


def test_scenarios_are_the_official_splits(path: str) -> None:
    assert [sorted(scenarios(path, split)) for split in ("train", "validation", "test")] == [
        ["train-0", "train-1"],
        ["dev-0"],
        ["test-0", "test-1"],
    ]
    assert len(envs.scenarios("tau_bench", {"path": path}, "train", 5, 0)) == 5  # train begins anew
    assert len(envs.scenarios("tau_bench", {"path": path}, "test", 5, 0)) == 2
    with pytest.raises(UsageError, match="no split 'dev' of tau_bench"):
        envs.scenarios("tau_bench", {"path": path}, "dev", 1, 0)
    assert sorted(scenarios(path, "test", domain="airline")) == ["air-0"]
    for split in ("train", "validation"):
        with pytest.raises(UsageError, match=f"no split '{split}' of airline: .*only test"):
            scenarios(path, split, domain="airline")


def test_an_instruction_keeps_the_white_space_that_its_author_gave_it(tmp_path: Path) -> None:
    path, text = tau_small.write(tmp_path), "  Return #W1:  Mug; \n"
    (tmp_path / "retail" / "tasks_train.jsonl").write_text(json.dumps(tau_small.task(" t ", text, [])) + "\n")
    (one,) = scenarios(path, "train").values()
    assert (one.id, one.data["instruction"]) == ("t", text)
    heard: list[str] = []

    def listen(messages: Sequence[Message], **sampling: Any) -> str:
        heard.append(messages[0]["content"])
        return "Hi."

    env = envs.make_env("tau_bench", {"path": path}, listen)()
    env.reset(one)
    assert f"\n\nInstruction: {text}\n\nRules:\n" in heard[0]


def test_training_tasks_can_be_held_out_for_validation_beside_the_dev_tasks(path: str) -> None:
    def ids(split: str, **options: Any) -> set[str]:
        return set(scenarios(path, split, **options))

    assert ids("validation", validation_tasks=1) | ids("train", validation_tasks=1) == {"dev-0", "train-0", "train-1"}
    assert len(ids("train", validation_tasks=1)) == 1 and "dev-0" in ids("validation", validation_tasks=1)
    assert ids("test", validation_tasks=1) == {"test-0", "test-1"}
    dealt = {frozenset(ids("train", validation_tasks=1, split_seed=seed)) for seed in range(9)}
    assert len(dealt) == 2  # another number holds out another task
    for split in ("train", "validation"):
        with pytest.raises(UsageError, match=r"validation_tasks.*fewer than the 2 training tasks, found 2"):
            ids(split, validation_tasks=2)


@needs(DATA / "tau_bench")
def test_a_hundred_real_training_tasks_are_held_out_and_all_texts_are_the_original_s() -> None:
    """Of the 500 training tasks' texts each ends with a space."""
    options = {"validation_tasks": 100}
    splits = {split: scenarios(str(DATA / "tau_bench"), split, **options) for split in ("train", "validation", "test")}
    assert [len(found) for found in splits.values()] == [400, 120, 100]
    assert not set(splits["train"]) & set(splits["validation"])
    assert sum(name.startswith("retail-dev") for name in splits["validation"]) == 20
    published = {
        row["id"]: row["instruction"]
        for split in ("train", "dev", "test")
        for row in map(json.loads, (DATA / "tau_bench" / "retail" / f"tasks_{split}.jsonl").read_text().splitlines())
    }
    for found in splits.values():
        assert all(one.data["instruction"] == published[name] for name, one in found.items())
    assert all(one.data["instruction"].endswith(" ") for one in splits["train"].values())


def test_the_airline_s_desk_works_the_same_way(path: str) -> None:
    env = envs.make_env("tau_bench", {"path": path, "domain": "airline"}, customer)()
    env.reset(scenarios(path, "test", domain="airline")["air-0"])
    env.step(acted("cancel_reservation", reservation_id="ABC123"))
    assert env.step(said("Bye.")).reward == 1


def test_without_data_or_a_customer_one_sentence_says_what_to_do(path: str, tmp_path: Path) -> None:
    for options, told in (
        ({}, "task.options.path: tau_bench ships no data. Run: turnwise data fetch tau_bench"),
        ({"path": str(tmp_path)}, "there is no folder 'retail'"),
        ({"path": "nowhere", "domain": "airline"}, "there is no folder 'airline' in 'nowhere'"),
        ({"path": path, "domain": "telecom"}, "task.options.domain of tau_bench"),
    ):
        with pytest.raises(UsageError, match=told):
            envs.make_env("tau_bench", options, customer)
        with pytest.raises(UsageError):
            envs.scenarios("tau_bench", options, "test", 1, 0)
    with pytest.raises(UsageError, match=r"no rule can play the user.*Set task.oracle"):
        envs.make_env("tau_bench", {"path": path}, None)


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("orders.json", "{", "there is no JSON in .*orders.json"),
        ("users.json", "[]", "the JSON is no object in .*users.json"),
        ("tools.json", "{}", "the JSON is no list"),
        ("tools.json", "[5]", "a tool has no function with a name"),
        ("tools.json", '[{"function": {"name": "fly"}}]', "the tool 'fly' is none of retail's"),
        ("policy.md", None, "cannot read .*policy.md.*No such file"),
        ("tasks_test.jsonl", "5", "line 1 is no JSON object"),
        ("tasks_test.jsonl", '{"id": "a"}', "line 1 has no list 'actions'"),
        ("tasks_test.jsonl", '{"id": "a", "actions": [{"name": "x"}]}', "line 1 has no list 'actions'"),
        ("tasks_test.jsonl", '{"id": "a", "actions": [], "outputs": [5]}', "'outputs' that are no list of texts"),
        ("tasks_test.jsonl", '{"id": "a", "actions": []}', "line 1 has no text 'instruction'"),
    ],
)
def test_a_broken_file_is_one_sentence_with_its_name(tmp_path: Path, file: str, text: str | None, told: str) -> None:
    path = tau_small.write(tmp_path)
    place = tmp_path / "retail" / file
    place.unlink()
    if text is not None:
        place.write_text(text)
    options = {"path": path}
    with pytest.raises(UsageError, match=told):
        envs.scenarios("tau_bench", options, "test", None, 0) if file.startswith("tasks") else envs.make_env(
            "tau_bench", options, customer
        )


def test_actions_are_kept_as_json_in_a_scenario(path: str) -> None:
    (one,) = scenarios(path, "validation").values()
    assert json.loads(json.dumps(dict(one.data))) == dict(one.data)
    assert set(one.data) == {"instruction", "actions", "outputs"}
