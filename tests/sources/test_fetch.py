"""`turnwise data`: what is fetched, how it is checked and converted, and that a folder is there whole or not at all."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer
from shared_data import DATA, needs

from stages import envs
from stages.envs.exact24 import quadruples
from stages.frame.types import MissingInput, TurnwiseError, UsageError
from stages.sources.catalogue import TASKS
from stages.sources.convert import tau_tasks, tau_tools
from stages.sources.download import download
from stages.sources.fetch import fetch, state, task_data
from stages.sources.folders import MANIFEST
from stages.sources.models import MODELS
from stages.store.workspace import silent
from turnwise import cli

GITHUB = "https://raw.githubusercontent.com"


def puzzles(n: int = 1362) -> bytes:
    """As many solvable puzzles as were published: all there are."""
    rows = [f"{rank},{' '.join(map(str, numbers))}" for rank, numbers in enumerate(quadruples()[:n], 1)]
    return "\n".join(["Rank,Puzzles", *rows, ""]).encode()


def concepts(objects: int = 1823) -> bytes:
    """A list like THINGS: the first 31 objects have two senses."""
    names = [
        name
        for i in range(objects)
        for name in ([f"thing{i} (animal)", f"thing{i} (sports)"] if i < 31 else [f"thing{i}"])
    ]
    return ("index,THINGS-concept\n" + "".join(f"{i},{name}\n" for i, name in enumerate(names))).encode()


def lmrl_file(words: str = '{"Clothes": ["Pants;Pant", "Hat"]}') -> bytes:
    return f'import nltk  # is not there, and is not needed\nraise SystemExit("run")\nDEFAULT_OBJECT_DICT = {words}\n'.encode()


@pytest.fixture
def server() -> Iterator[FileServer]:
    found = FileServer()
    yield found
    found.close()


@pytest.fixture
def get(server: FileServer) -> Callable[[str], bytes]:
    def get(url: str) -> bytes:
        assert url.startswith(f"{GITHUB}/")
        return download(url.replace(GITHUB, server.url), silent, backoff_s=0.001)

    return get


def offline(url: str) -> bytes:
    raise AssertionError(f"asked for {url}")


def place(name: str, file: str) -> str:
    """Where the server keeps what a file of a task is made of."""
    return next(made.of[0].url for made in TASKS[name].files if made.name == file).removeprefix(GITHUB)


def test_a_download_is_converted_checked_and_listed(
    server: FileServer, get: Callable[[str], bytes], tmp_path: Path
) -> None:
    server.files[place("game24", "24.csv")] = puzzles()
    task = task_data("game24")
    assert state(task, tmp_path) == "absent"
    manifest = fetch(task, tmp_path, get)
    assert (tmp_path / "game24" / "24.csv").read_bytes() == puzzles()
    entry = manifest["files"]["24.csv"]
    assert (entry["rows"], entry["check"], entry["licence"], entry["commit"]) == (
        1362,
        "rows",
        "MIT",
        "ab400345c5ea39d28ea6d7d3be0e417b11113c87",
    )
    (source,) = entry["sources"]
    assert (
        source["url"].endswith("/ab400345c5ea39d28ea6d7d3be0e417b11113c87/src/tot/data/24/24.csv")
        and source["sha256"] == entry["sha256"]
    )
    assert json.loads((tmp_path / "game24" / MANIFEST).read_text()) == manifest
    assert state(task, tmp_path) == "present"
    assert [path.name for path in tmp_path.iterdir()] == ["game24"]
    # What is there is not fetched again.
    assert fetch(task, tmp_path, offline) == manifest


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (puzzles(1361), "gives 1361 rows of 24.csv, wanted 1362"),
        (puzzles().replace(b"1,1 1 1 8", b"1,1 1 1 1"), "line 2 cannot make 24"),
        (b"\x00\xff" * 1000, "rows of 24.csv, wanted 1362"),
    ],
)
def test_another_file_leaves_nothing_behind(
    server: FileServer, get: Callable[[str], bytes], tmp_path: Path, content: bytes, said: str
) -> None:
    assert puzzles().splitlines()[1] == b"1,1 1 1 8"
    server.files[place("game24", "24.csv")] = content
    with pytest.raises(TurnwiseError, match=said):
        fetch(task_data("game24"), tmp_path, get)
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_another_checksum_is_refused(
    server: FileServer, get: Callable[[str], bytes], tmp_path: Path
) -> None:
    server.files[place("math", "test.jsonl")] = b'{"problem": "p", "answer": "1", "level": 1}\n' * 500
    with pytest.raises(TurnwiseError, match=r"published file has 35dc41080a36\.\.\."):
        fetch(task_data("math"), tmp_path, get)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "test.jsonl").write_bytes(b"{}\n")
    with pytest.raises(TurnwiseError, match="cut off or another one"):
        fetch(task_data("math"), tmp_path / "out", offline, source=tmp_path / "mine")
    assert list((tmp_path / "out").iterdir()) == []


def test_senses_are_dropped_equal_names_merged_and_code_is_never_run(
    server: FileServer, get: Callable[[str], bytes], tmp_path: Path
) -> None:
    words = json.dumps({"Clothes": ["Pants;Pant", *(f"Hat{i}" for i in range(157))]})
    server.files[place("twenty_questions", "things_objects.csv")] = concepts()
    server.files[place("twenty_questions", "lmrl_gym_objects.jsonl")] = lmrl_file(words)
    fetch(task_data("twenty_questions"), tmp_path, get)
    folder = tmp_path / "twenty_questions"
    rows = list(csv.DictReader(io.StringIO((folder / "things_objects.csv").read_text())))
    assert len(rows) == 1823 and rows[0] == {
        "id": "0",
        "object": "thing0",
        "senses": "thing0 (animal); thing0 (sports)",
    }
    assert rows[31] == {"id": "31", "object": "thing31", "senses": ""}
    first, *others = map(json.loads, (folder / "lmrl_gym_objects.jsonl").read_text().splitlines())
    assert first == {"category": "Clothes", "object": "Pants", "variants": ["Pants", "Pant"]} and len(others) == 157


@pytest.mark.parametrize(
    "content", [b"", b"x = 1", b"DEFAULT_OBJECT_DICT = open('x')", b"DEFAULT_OBJECT_DICT = [1]", b"\xff(", b"("]
)
def test_content_in_another_form_is_one_sentence(
    server: FileServer, get: Callable[[str], bytes], tmp_path: Path, content: bytes
) -> None:
    server.files[place("twenty_questions", "things_objects.csv")] = concepts()
    server.files[place("twenty_questions", "lmrl_gym_objects.jsonl")] = content
    with pytest.raises(TurnwiseError, match="not in the form that turnwise knows"):
        fetch(task_data("twenty_questions"), tmp_path, get)


def test_a_folder_gives_ready_files_or_published_ones_and_no_network_is_asked(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "things_objects.csv").write_text("id,object,senses\n0,cat,\n")
    (mine / "data.py").write_bytes(lmrl_file())
    files = fetch(task_data("twenty_questions"), tmp_path / "out", offline, source=mine)["files"]
    assert {
        name: (entry["rows"], entry["check"], "sha256" in entry["sources"][0]) for name, entry in files.items()
    } == {"things_objects.csv": (1, "read", False), "lmrl_gym_objects.jsonl": (2, "read", True)}
    options = {
        "objects": str(tmp_path / "out" / "twenty_questions" / "lmrl_gym_objects.jsonl"),
        "test": 1.0,
        "validation": 0.0,
    }
    assert {s.id for s in envs.scenarios("twenty_questions", options, "test", None, 0)} == {"Pants", "Hat"}


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=r"wanted things_objects\.csv or things\.csv in "):
        fetch(task_data("twenty_questions"), tmp_path / "out", offline, source=tmp_path)
    with pytest.raises(UsageError, match="--from: wanted a folder"):
        fetch(task_data("game24"), tmp_path / "out", offline, source=tmp_path / "none")


def test_a_folder_that_was_changed_is_neither_used_nor_overwritten(tmp_path: Path) -> None:
    (tmp_path / "24.csv").write_bytes(puzzles(3))
    task, out = task_data("game24"), tmp_path / "out"
    fetch(task, out, offline, source=tmp_path)
    for change in (b"Rank,Puzzles\n", None):
        file = out / "game24" / ("24.csv" if change is not None else MANIFEST)
        file.write_bytes(change) if change is not None else file.unlink()
        assert state(task, out) == "changed"
        with pytest.raises(UsageError, match="Remove it"):
            fetch(task, out, offline, source=tmp_path)


Turnwise = Callable[..., tuple[int, str, str]]


@pytest.fixture
def turnwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Turnwise:
    home = tmp_path / "home"
    for folder in ("data", "mlflow"):
        (home / folder).mkdir(parents=True)
    monkeypatch.chdir(home)

    def turnwise(*argv: str) -> tuple[int, str, str]:
        return cli.main(argv), *capsys.readouterr()

    return turnwise


def test_the_command_says_what_came_and_how_to_use_it(turnwise: Turnwise, tmp_path: Path) -> None:
    (tmp_path / "24.csv").write_bytes(puzzles(100))
    status, out, err = turnwise("data", "fetch", "game24", "--from", str(tmp_path))
    assert status == 0 and "100 rows  checked by read" in out
    assert "24.csv: the published file has 1,362 rows; this is a part of it." in err
    assert out.splitlines()[-1].endswith(
        "Use: turnwise run PRESET --set task.env=game24 --set task.options.path=data/tasks/game24/24.csv"
    )
    assert (tmp_path / "home" / "data" / "tasks" / "game24" / "24.csv").is_file()
    found: dict[str, Any] = json.loads(turnwise("data", "fetch", "game24", "--json")[1])
    assert found["files"]["24.csv"]["rows"] == 100
    listed = {row["task"]: row["state"] for row in json.loads(turnwise("data", "list", "--json")[1])}
    assert listed["game24"] == "present" and set(listed) == {*TASKS, *MODELS} and listed["math"] == "absent"
    assert "game24            present  the puzzles" in turnwise("data", "list")[1]


def test_a_wrong_command_is_one_sentence(turnwise: Turnwise) -> None:
    for argv, said in (
        (("fetch",), "wanted a task or a model. Tasks: math, "),
        (("fetch", "game42"), "no published data for 'game42'; did you mean 'game24'? Tasks: "),
        (("fetch", "xyz"), "no published data for 'xyz'. Tasks: "),
        (("fetch", "game24", "--from", "nowhere"), "--from: wanted a folder"),
    ):
        status, out, err = turnwise("data", *argv)
        assert (status, out) == (2, "") and said in err and err.count("\n") == 1


def test_every_source_is_https_at_a_commit_with_a_licence() -> None:
    for task in TASKS.values():
        assert task.name in envs.environments()
        for made in task.files:
            for of in made.of:
                assert of.url.startswith(f"{GITHUB}/{of.repo}/{of.commit}/") and of.licence
                assert 7 <= len(of.commit) <= 40 and set(of.commit) <= set("0123456789abcdef")
                assert {len(of.sha256), len(made.sha256)} <= {0, 64}


@needs(DATA)
@pytest.mark.parametrize(
    ("name", "folder"),
    [("math", "math500"), ("twenty_questions", "twenty_questions"), ("game24", "game24"), ("wiki_search", "wiki")],
)
def test_the_real_data_is_taken_from_a_folder(tmp_path: Path, name: str, folder: str) -> None:
    manifest = fetch(task_data(name), tmp_path, offline, source=DATA / folder)
    checked = {file: entry["check"] for file, entry in manifest["files"].items()}
    # Of these a part is kept elsewhere; the questions have other ids.
    parts = {
        "things_objects.csv": "read",
        "24.csv": "read",
        "questions.jsonl": "rows",
        "retail/tasks_test.jsonl": "read",
        "airline/tasks_test.jsonl": "read",
    }
    assert checked == {file: parts.get(file, "sha256") for file in checked}


@needs(DATA)
def test_pages_and_questions_are_made_of_the_published_passages(
    server: FileServer, get: Callable[[str], bytes], tmp_path: Path
) -> None:
    """The published bytes can be made again from the pages: the very pages and 438 questions come of them."""
    pages = [json.loads(line) for line in (DATA / "wiki" / "pages.jsonl").read_text().splitlines()]
    server.files[place("wiki_search", "pages.jsonl")] = json.dumps(
        [{"title": p["title"], "text": p["text"]} for p in pages], indent=4
    ).encode()
    manifest = fetch(task_data("wiki_search"), tmp_path, get)
    assert len(server.asked) == 1
    assert [entry["check"] for entry in manifest["files"].values()] == ["sha256", "sha256"]
    assert (tmp_path / "wiki_search" / "pages.jsonl").read_bytes() == (DATA / "wiki" / "pages.jsonl").read_bytes()
    made, given = (
        {(q["question"], q["answer"], *q["support"]) for q in map(json.loads, path.read_text().splitlines())}
        for path in (tmp_path / "wiki_search" / "questions.jsonl", DATA / "wiki" / "questions.jsonl")
    )
    assert made == given and len(made) == 438
    counts = [
        len(envs.scenarios("wiki_search", {"path": str(tmp_path / "wiki_search")}, split, None, 0))
        for split in ("train", "validation", "test")
    ]
    assert counts[2] == 100 and sum(counts) == 438


def tau_source(file: Path) -> bytes:
    """A task list as tau-bench has it: Python calls."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    tasks = []
    for row in rows:
        actions = ", ".join(f"Action(name={a['name']!r}, kwargs={a['kwargs']!r})" for a in row["actions"])
        told = ", ".join(f"{key}={row[key]!r}" for key in ("annotator", "user_id", "instruction", "outputs"))
        tasks.append(f"    Task({told}, actions=[{actions}]),")
    return "\n".join(["from tau_bench.types import Action, Task", "", "TASKS = [", *tasks, "]", ""]).encode()


@needs(DATA)
def test_tau_bench_is_made_of_a_checkout_without_running_it(tmp_path: Path) -> None:
    """Rebuilt as its files are written; the tasks and tools that come out have the bytes of those at hand."""
    for domain in ("retail", "airline"):
        mine, there = DATA / "tau_bench" / domain, tmp_path / "tau_bench" / "envs" / domain
        (there / "tools").mkdir(parents=True)
        (there / "data").mkdir()
        for made in (made for made in TASKS["tau_bench"].files if made.name.startswith(domain) and len(made.of) == 1):
            file = mine / made.name.partition("/")[2]
            (tmp_path / made.of[0].path).write_bytes(tau_source(file) if file.suffix == ".jsonl" else file.read_bytes())
        for tool in json.loads((mine / "tools.json").read_text()):
            code = f"raise SystemExit('run')\nclass X(Tool):\n    @staticmethod\n    def get_info():\n        return {tool!r}\n"
            (there / "tools" / f"{tool['function']['name']}.py").write_text(code)
    files = fetch(task_data("tau_bench"), tmp_path / "out", offline, source=tmp_path)["files"]
    for name in files:
        assert (tmp_path / "out" / "tau_bench" / name).read_bytes() == (DATA / "tau_bench" / name).read_bytes(), name
    assert len(files["retail/tools.json"]["sources"]) == 16 and files["retail/tasks_train.jsonl"]["check"] == "sha256"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"TASKS = []\nx = (",
        b"TASKS = [1]",
        b"TASKS = [Task(1)]",
        b"TASKS = [Task(actions=open('x'))]",
        b"TASKS = [Job()]",
    ],
)
def test_a_task_list_in_another_form_is_refused(content: bytes) -> None:
    with pytest.raises((ValueError, KeyError, SyntaxError)):
        tau_tasks(content, name="x")
    with pytest.raises(ValueError, match="no get_info"):
        tau_tools(b"x = 1")


@needs(DATA)
def test_the_conversions_give_the_real_files_back() -> None:
    """From the known published form, rebuilt: LMRL-Gym's and MATH's have the same bytes, THINGS the same rows."""
    folder = DATA / "twenty_questions"
    made = {file.name: file for task in TASKS.values() for file in task.files}
    words: dict[str, list[str]] = {}
    for row in map(json.loads, (folder / "lmrl_gym_objects.jsonl").read_text().splitlines()):
        words.setdefault(row["category"], []).append(";".join(row["variants"]))
    assert (
        made["lmrl_gym_objects.jsonl"].convert(lmrl_file(repr(words)))
        == (folder / "lmrl_gym_objects.jsonl").read_bytes()
    )
    train = [json.loads(line) for line in (DATA / "math500" / "train.jsonl").read_text().splitlines()]
    raw = [
        {**{k: r[k] for k in ("problem", "answer")}, "diffculty": float(r["level"] or "nan"), "type": r["subject"]}
        for r in train
    ]
    assert made["train.jsonl"].convert(json.dumps(raw).encode()) == (DATA / "math500" / "train.jsonl").read_bytes()
    rows = list(csv.DictReader(io.StringIO((folder / "things_objects.csv").read_text())))
    names = [name for row in rows for name in (row["senses"].split("; ") if row["senses"] else [row["object"]])]
    again = made["things_objects.csv"].convert(
        ("index,THINGS-concept\n" + "".join(f"{i},{name}\n" for i, name in enumerate(names))).encode()
    )
    assert [(r["object"], r["senses"]) for r in csv.DictReader(io.StringIO(again.decode()))] == [
        (r["object"], r["senses"]) for r in rows
    ]
