"""Modules of one's own: found in the project folder alone, and each thing that is wrong with one is a sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from toys import ToyRun

from stages import envs
from stages.frame.border import BrokenEnvironment
from stages.frame.own import own_module
from stages.frame.sections import TaskConfig
from stages.frame.types import UsageError
from stages.store.contents import code_hash, own_parts

GAME = """from stages.frame.contract import Config
from lab.rules import WORD


class OPTIONS(Config):
    word: str = WORD


def make(options, ask=None):
    return list


def scenarios(options, split, n, seed):
    return []
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project folder with an environment, lab.games.walk, that reads another module of it."""
    (tmp_path / "lab" / "games").mkdir(parents=True)
    (tmp_path / "lab" / "games" / "walk.py").write_text(GAME)
    (tmp_path / "lab" / "rules.py").write_text("WORD = 'go'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    forget()


def forget() -> None:
    """As a new process begins."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]
    code_hash.cache_clear()
    from stages.frame import own

    own._imported.cache_clear()


def code() -> str:
    forget()
    return code_hash(envs.module_name("lab.games.walk"))


def test_an_environment_of_one_s_own_is_a_module_of_the_project_folder(project: Path) -> None:
    assert envs.checked_options("lab.games.walk", {}).model_dump() == {"word": "go"}
    with pytest.raises(BrokenEnvironment, match=r"make of lab.games.walk \(lab/games/walk.py\) wants .* found list"):
        envs.make_env("lab.games.walk", {})()
    assert envs.scenarios("lab.games.walk", {}, "train", None, 0) == []
    with pytest.raises(UsageError, match=r"lab.games.walk has no option 'wort'; did you mean 'word'"):
        envs.checked_options("lab.games.walk", {"wort": 1})
    assert "lab.games.walk" not in envs.environments()


def test_its_code_is_hashed_with_all_that_it_imports_of_the_project_and_of_our_environments(project: Path) -> None:
    before = code()
    (project / "lab" / "rules.py").write_text("# A word.\nWORD = ('go')\n")
    assert code() == before
    (project / "lab" / "rules.py").write_text("WORD = 'went'\n")
    changed = code()
    (project / "lab" / "__init__.py").write_text("import warnings\n")  # it runs, too
    assert len({before, changed, code()}) == 3
    (project / "lab" / "rules.py").write_text("WORD = 'went'\nfrom stages.envs import splits\n")
    forget()
    assert code_hash(envs.module_name("lab.games.walk")) != changed


def test_a_run_tells_where_its_own_parts_lie_and_which_they_were(project: Path) -> None:
    (project / "words").mkdir()
    run = ToyRun(task=TaskConfig(env="lab.games.walk"))
    assert own_parts(ToyRun()) == {}
    assert own_parts(run) == {"task.env": f"lab/games/walk.py {code()[:12]}"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("lab.games.run", "", r"there is no module 'lab.games.run' in .*; wanted the file lab/games/run.py there."),
        ("lab..walk", "", "there is no environment 'lab..walk'"),
        ("../walk.py", "", "there is no environment"),
        ("os.path", "", "there is no module 'os.path' in"),  # installed, and not the project's
        ("lab.games.walk", "x = 1\n", r"lab/games/walk.py lacks OPTIONS, make, scenarios; it has to export OPTIONS,"),
        ("lab.games.walk", "import numpyy\n", r"cannot be imported: ModuleNotFoundError: No module named 'numpyy' \(lab/games/walk.py, line 1\)"),
        ("lab.games.walk", "def f(:\n", r"cannot be imported: SyntaxError: .*walk.py, line 1"),
        ("lab.games.walk", "x = 1\n1 / 0\n", r"cannot be imported: ZeroDivisionError: .* \(lab/games/walk.py, line 2\)"),
        ("lab.games.walk", "raise SystemExit(0)\n", r"cannot be imported: SystemExit: 0 \(lab/games/walk.py, line 1\)"),
        ("lab.games.walk", "OPTIONS = {}\nmake = scenarios = print\n", r"OPTIONS of lab/games/walk.py wants a class that extends Config"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_one_is_a_sentence_that_names_the_key(
    name: str, text: str, said: str, project: Path
) -> None:
    (project / "lab" / "games" / "walk.py").write_text(text)
    with pytest.raises(UsageError, match=rf"^task.env: .*{said}") as caught:
        envs.options_of(name)
    assert "\n" not in str(caught.value)


def test_a_module_of_the_same_name_elsewhere_is_not_taken_for_it(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_module("task.env", "lab.games.walk", ("make",))
    other = tmp_path_factory.mktemp("other")
    (other / "lab" / "games").mkdir(parents=True)
    (other / "lab" / "games" / "walk.py").write_text("make = 1\n")
    monkeypatch.chdir(other)
    with pytest.raises(UsageError, match=r"lab.games.walk is another module already, .*; give the folder lab another"):
        own_module("task.env", "lab.games.walk", ("make",))
