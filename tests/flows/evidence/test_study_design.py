"""A study's file: what is wrong or unfair in it is one sentence, before anything runs; what is tuned, and what is chosen."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from flows import presets
from flows.evidence.study import cells, design, finish, tables
from flows.evidence.study.rows import Row
from stages.frame.types import UsageError

STUDIES = sorted((Path(__file__).parents[3] / "studies").glob("*.toml"))
TUNED = """
seeds = [1, 2]
sets = ["iterations=3"]
[methods.nlac]
preset = "demo"
[methods.rft]
preset = "desk+rft"
control = "nlac"
[methods.frozen]
preset = "desk+nlac_frozen"
settings = "nlac"
[methods.paper]
preset = "desk+nlac_one_step"
settings = "preset"
[tasks.easy]
sets = ["task.options.give_by=request"]
[tasks.hard]
sets = ["task.options.requests=8"]
presets = { rft = "own.toml" }
[tuning]
seeds = [7, 8]
n = 3
tasks = ["easy"]
[tuning.space.nlac]
"distill.lr" = [1e-3, 2e-3]
"critic.epochs" = [4, 8]
[tuning.space.rft]
"rft.epochs" = [2, 3, 5]
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "study.toml"
    file.write_text(text)
    (folder / "own.toml").write_text('extends = "desk+rft"\n')
    return file


@pytest.fixture
def tuned(tmp_path: Path) -> design.Study:
    return design.read(written(tmp_path, TUNED))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("[methods.rft]", "[method.rft]", "There is no section or key 'method'; did you mean 'methods'?"),
        ('control = "nlac"', 'contrl = "nlac"', "no key 'methods.rft.contrl'; did you mean 'control'?"),
        (
            'control = "nlac"',
            'control = "nlca"',
            "methods.rft.control: there is no method 'nlca'; did you mean 'nlac'?",
        ),
        ("presets = { rft", "presets = { rtf", "tasks.hard.presets: there is no method 'rtf'; did you mean 'rft'?"),
        ('tasks = ["easy"]', 'tasks = ["easi"]', "tuning.tasks: there is no task 'easi'; did you mean 'easy'?"),
        (
            'settings = "nlac"',
            'settings = "nlca"',
            "methods.frozen.settings: 'nlca' is not tuned; did you mean 'nlac'?",
        ),
        (
            'settings = "nlac"',
            'settings = "nlac"\ntasks = ["easi"]',
            "methods.frozen.tasks: there is no task 'easi'; did you mean 'easy'?",
        ),
        (
            'settings = "nlac"',
            'settings = "nlac"\nseeds = 3',
            "methods.frozen.seeds: wanted at most 2, as many as the table has; found 3.",
        ),
        ("[tasks.hard]", "[tasks.hard]\nseeds = 3", "tasks.hard.seeds: wanted at most 2, as many as the table has"),
        ('settings = "nlac"', 'settings = "paper"', "methods.frozen.settings: 'paper' is not tuned"),
        ("space.rft]", "space.rtf]", "tuning.space: rft has none. Add [tuning.space.rft]"),
        ('settings = "nlac"', "", "tuning.space: frozen has none"),
        (
            "seeds = [1, 2]",
            'seeds = [1, 2]\nby_seed = { "task.options.rules_seed" = [5] }',
            "by_seed: wanted 2 values of 'task.options.rules_seed', one for each seed; found 1.",
        ),
        ("seeds = [7, 8]", "seeds = [2, 8]", "tuning.seeds: 2 is a seed of the table, too"),
        ("seeds = [1, 2]", "seeds = [1, 1]", "seeds: 1 stands there twice"),
        ("seeds = [1, 2]", "seeds = []", "seeds: tuple should have at least 1 item"),
        ("seeds = [1, 2]", "", "seeds: field required"),
        ("iterations=3", "seed=3", "sets: 'seed=3' is not allowed here"),
        ("[tasks.easy]", '[tasks."a/b"]\n[tasks.easy]', "'a/b': a name holds no '/'"),
        ("[methods.rft]", "[methods.rft", "is not readable TOML"),
    ],
)
def test_what_is_wrong_or_unfair_is_one_sentence(old: str, new: str, told: str, tmp_path: Path) -> None:
    assert old in TUNED
    with pytest.raises(UsageError) as error:
        design.read(written(tmp_path, TUNED.replace(old, new, 1)))
    assert told in str(error.value)
    assert str(error.value).startswith(("study.toml: ", "The study study.toml "))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("iterations=3", "iteration=3", "nlac / easy: There is no section or key 'iteration'; did you mean 'iterations'?"),
        ('"desk+rft"', '"desk+rtf"', "rft / easy: There is no task, method or model 'rtf'; did you mean 'rft'?"),
        ('"rft.epochs" = [2, 3, 5]', '"rft.epoch" = [2, 3, 5]', "There is no key 'rft.epoch'"),
        # Two of the three settings: one of the values is the preset's own.
        ("[2, 3, 5]", "[2, 3]", "tuning.space.rft: wanted 2 settings that differ from the preset's, so that all methods have n = 3; found 1."),
    ],
)  # fmt: skip
def test_what_no_run_could_have_is_told_before_the_first_one(old: str, new: str, told: str, tmp_path: Path) -> None:
    asked = design.read(written(tmp_path, TUNED.replace(old, new, 1)))
    with pytest.raises(UsageError) as error:
        cells.tuning_cells(asked)
    assert told in str(error.value)


def test_a_study_without_tuning_needs_a_method_and_a_seed_alone(tmp_path: Path) -> None:
    asked = design.read(written(tmp_path, 'seeds = [4]\n[methods.demo]\npreset = "demo"'))
    (cell,) = cells.table_cells(asked, {})
    assert cell.run == presets.load("demo", ["seed=4"])
    with pytest.raises(UsageError, match="nothing is tuned"):
        design.read(written(tmp_path, 'seeds = [4]\n[methods.demo]\npreset = "demo"\nsettings = "preset"'))


def test_every_method_is_tuned_over_as_many_different_settings_its_presets_own_first(tuned: design.Study) -> None:
    for method in tuned.tuned:
        found = cells.settings(tuned, method)
        runs = {cells.identity(presets.load(tuned.methods[method].preset, setting)) for setting in found}
        assert (found[0], len(found), len(runs)) == ((), 3, 3)
        assert found == cells.settings(tuned, method)
    assert set(cells.settings(tuned, "rft")) == {(), ("rft.epochs=3",), ("rft.epochs=5",)}  # 2 is the preset's own
    drawn = {
        tuple(
            cells.settings(tuned.model_copy(update={"tuning": tuned.tuning.model_copy(update={"draw": draw})}), "nlac")
        )
        for draw in range(20)
        if tuned.tuning is not None
    }
    assert len(drawn) == 6  # 2 of 3 others, in either order


def test_the_cells_are_methods_by_tasks_by_seeds_each_with_its_settings(tuned: design.Study) -> None:
    chosen = {"nlac": ("distill.lr=0.001",), "rft": ()}
    found = {(cell.method, cell.task, cell.seed): cell for cell in cells.table_cells(tuned, chosen)}
    assert len(found) == 4 * 2 * 2
    assert {name: found[name, "easy", 1].setting for name in tuned.methods} == {
        "nlac": ("distill.lr=0.001",), "rft": (), "frozen": ("distill.lr=0.001",), "paper": (),
    }  # fmt: skip
    assert found["frozen", "hard", 2].run == presets.load(
        "desk+nlac_frozen", ["iterations=3", "task.options.requests=8", "distill.lr=0.001", "seed=2"]
    )
    assert Path(found["rft", "hard", 1].preset).name == "own.toml"
    assert {cell.method for cell in cells.table_cells(tuned, {"rft": ()})} == {"rft", "paper"}
    tuning = cells.tuning_cells(tuned)
    assert len(tuning) == 2 * 3 * 2  # two methods, three settings, two seeds
    assert {(cell.task, cell.seed) for cell in tuning} == {("easy", 7), ("easy", 8)}


def test_what_an_arm_is_there_to_change_is_not_overruled_by_the_settings_it_borrows(tmp_path: Path) -> None:
    text = TUNED.replace('settings = "nlac"', 'settings = "nlac"\nsets = ["critic.epochs=2"]')
    study = design.read(written(tmp_path, text))
    found = cells.table_cells(study, {"nlac": ("distill.lr=0.001", "critic.epochs=8"), "rft": ()})
    arms: dict[str, Any] = {cell.method: cell for cell in found}
    assert (arms["nlac"].run.critic.epochs, arms["frozen"].run.critic.epochs) == (8, 2)
    assert arms["frozen"].run.distill.lr == 0.001 and arms["frozen"].setting == ("distill.lr=0.001",)


def tried(asked: design.Study, rates: dict[tuple[str, int, int], list[float]]) -> list[Row]:
    """Tuning rows: (method, number of its setting, seed) -> validation win rates of the iterations."""
    return [
        {
            "part": "tuning", "method": method, "task": "easy", "seed": seed, "setting": list(cells.settings(asked, method)[number]),
            "curve": [{"iteration": -1, "win_rate": 1.0}, *({"iteration": i, "win_rate": rate} for i, rate in enumerate(curve))],
        }
        for (method, number, seed), curve in rates.items()
    ]  # fmt: skip


def by_hand(asked: design.Study, method: str, rates: dict[tuple[str, int, int], list[float]]) -> Any:
    best, taken = -1.0, None
    for number, setting in enumerate(cells.settings(asked, method)):
        mean = statistics.mean(max(rates[method, number, seed]) for seed in (7, 8))
        if mean > best:
            best, taken = mean, setting
    return taken


def test_the_setting_with_the_best_mean_validation_win_rate_is_taken_the_earliest_of_equals(
    tuned: design.Study,
) -> None:
    # Of nlac the last setting has the best mean, though the second one has the best run; of rft two are equal.
    rates = {
        ("nlac", 0, 7): [0.1, 0.5], ("nlac", 0, 8): [0.4, 0.5], ("nlac", 1, 7): [0.9, 0.2], ("nlac", 1, 8): [0.1, 0.2],
        ("nlac", 2, 7): [0.6, 0.1], ("nlac", 2, 8): [0.2, 0.7], ("rft", 0, 7): [0.1], ("rft", 0, 8): [0.2],
        ("rft", 1, 7): [0.5], ("rft", 1, 8): [0.3], ("rft", 2, 7): [0.3], ("rft", 2, 8): [0.5],
    }  # fmt: skip
    chosen = cells.choose(tuned, tried(tuned, rates))
    assert chosen == {method: by_hand(tuned, method, rates) for method in ("nlac", "rft")}
    assert chosen == {"nlac": cells.settings(tuned, "nlac")[2], "rft": cells.settings(tuned, "rft")[1]}


def test_of_equals_the_one_that_wins_most_on_the_way_is_taken_where_the_study_says_so(tuned: design.Study) -> None:
    curves: dict[tuple[int, int], list[float]] = {
        (0, 7): [0.1, 0.5], (0, 8): [0.4, 0.5], (1, 7): [0.3, 0.6], (1, 8): [0.4, 0.4], (2, 7): [0.4, 0.4], (2, 8): [0.4, 0.4],
    }  # fmt: skip
    rates = {("nlac", *at): curve for at, curve in curves.items()}
    assert tuned.tuning is not None
    ways = [tuned.tuning.model_copy(update={"ties": ties}) for ties in ("first", "sooner")]
    asked = [tuned.model_copy(update={"tuning": way}) for way in ways]
    assert [cells.choose(one, tried(one, rates))["nlac"] for one in asked] == cells.settings(tuned, "nlac")[:2]


def test_a_method_of_which_a_run_is_missing_is_not_chosen_for(tuned: design.Study) -> None:
    rates = {(method, number, seed): [0.5] for method in ("nlac", "rft") for number in range(3) for seed in (7, 8)}
    del rates["rft", 1, 8]
    assert cells.choose(tuned, tried(tuned, rates)) == {"nlac": ()}


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_the_studies_that_ship_can_be_run(file: Path) -> None:
    asked = design.read(file)
    assert cells.tuning_cells(asked) or not asked.tuning
    assert cells.table_cells(asked, dict.fromkeys(asked.tuned, ()))


def test_each_seed_has_a_world_of_its_own_where_the_study_says_so(tmp_path: Path) -> None:
    text = TUNED.replace("seeds = [1, 2]", 'seeds = [1, 2]\nby_seed = { "task.options.rules_seed" = [5, 6] }', 1)
    text = text.replace("seeds = [7, 8]", 'seeds = [7, 8]\nby_seed = { "task.options.rules_seed" = [3, 4] }')
    study = design.read(written(tmp_path, text))
    found = {cell.seed: cell.run.task.options["rules_seed"] for cell in cells.tuning_cells(study)}
    table = cells.table_cells(study, dict.fromkeys(study.tuned, ()))
    assert found | {cell.seed: cell.run.task.options["rules_seed"] for cell in table} == {7: 3, 8: 4, 1: 5, 2: 6}
    assert all(f"task.options.rules_seed={cell.run.task.options['rules_seed']}" in cell.sets for cell in table)


@pytest.mark.parametrize(
    ("of_method", "of_task", "n"),
    [('tasks = ["hard"]\nseeds = 1', "", 13), ("seeds = 1", "seeds = 2", 14), ("", "seeds = 1", 12)],
)
def test_a_method_or_a_task_may_have_the_first_seeds_alone(
    of_method: str, of_task: str, n: int, tmp_path: Path
) -> None:
    text = TUNED.replace('settings = "nlac"', f'settings = "nlac"\n{of_method}')
    study = design.read(written(tmp_path, text.replace("[tasks.hard]", f"[tasks.hard]\n{of_task}")))
    planned = cells.table_cells(study, dict.fromkeys(study.tuned, ()))
    assert [one.seed for one in planned if one.method == "frozen" and one.task == "hard"] == [1]
    assert [one.seed for one in planned if one.method == "nlac" and one.task == "easy"] == [1, 2]
    assert len(planned) == n


def test_the_source_of_episodes_plays_everywhere(tmp_path: Path) -> None:
    untuned = TUNED.partition("[tuning]")[0].replace('settings = "nlac"', "").replace('settings = "preset"', "")
    text = f'source = "rft"{untuned}'.replace('control = "nlac"', "seeds = 1")
    with pytest.raises(UsageError, match=r"methods\.rft: the others learn from its episodes. Leave out"):
        design.read(written(tmp_path, text))


@pytest.mark.parametrize(
    ("only", "tuned_methods"),
    [("frozen/hard", {"nlac"}), ("rft/h*", {"rft"}), ("paper", set()), ("*/easy", {"nlac", "rft"})],
)
def test_only_some_cells_are_run_with_the_tuning_that_they_wait_for(
    tuned: design.Study, only: str, tuned_methods: set[str]
) -> None:
    meant = [cell for cell in cells.tuning_cells(tuned) if finish.is_meant(tuned, cell, [only])]
    assert {cell.method for cell in meant} == tuned_methods
    table = [
        cell
        for cell in cells.table_cells(tuned, dict.fromkeys(tuned.tuned, ()))
        if finish.is_meant(tuned, cell, [only])
    ]
    method, _, task = only.partition("/")
    assert {(cell.method, cell.task) for cell in table} == {
        (m, t) for m in tuned.methods for t in tuned.tasks if method in (m, "*") and t.startswith(task.rstrip("*"))
    }


def test_a_return_that_is_no_win_rate_stands_beside_it(tmp_path: Path) -> None:
    asked = design.read(
        written(tmp_path, 'seeds = [4, 5]\n[methods.demo]\npreset = "demo"\n[methods.rft]\npreset = "desk+rft"')
    )
    point = {"iteration": 0, "win_rate": 0.5, "episodes": 1.0, "generated_tokens": 1.0, "cpu_s": 1.0}
    kept = [
        {"part": "table", "method": method, "task": "as preset", "seed": seed, "base": 0.0, "final": 0.5, "curve": [point],
         "run": "r", "commit": "c", "final_return": paid}
        for method, returns in (("demo", (0.5, 0.5)), ("rft", (0.6, 0.8)))
        for seed, paid in zip((4, 5), returns, strict=True)
    ]  # fmt: skip
    head, lines = (found := tables.tables(asked, kept, {}, [])[0]).head, found.rows
    assert [line[head.index("return")] for line in lines] == ["0.50 [0.50, 0.50]", "0.70 [0.60, 0.80]"]
    assert "return" not in tables.tables(asked, kept[:2], {}, [])[0].head
    before = [{key: value for key, value in row.items() if key != "final_return"} for row in kept[:2]]
    first, _ = tables.tables(asked, before + kept[2:], {}, [])[0].rows
    assert first[head.index("return")] == "–"
