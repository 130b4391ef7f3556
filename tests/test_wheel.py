"""The wheel, installed into an environment of its own, in an empty folder and offline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import shipped

ROOT = Path(__file__).resolve().parents[1]
Turnwise = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(ROOT)]  # fmt: skip
    subprocess.run(build, check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def turnwise(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Turnwise:
    """Runs the installed command. Its environment lies over this one, whose packages it has, but for turnwise."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip())
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]  # fmt: skip
    subprocess.run(install, check=True)
    (own / "below.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env = {**clean, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(folder: Path, *argv: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [str(home / "bin" / "turnwise"), *argv] if argv[0] != "-m" else [str(python), *argv]
        return subprocess.run(command, cwd=folder, env={**env, **more}, capture_output=True, text=True)

    found = subprocess.run([python, "-c", "import flows; print(flows.__file__)"], cwd=home, env=env, capture_output=True, text=True)  # fmt: skip
    assert Path(found.stdout.strip()).is_relative_to(own), found.stderr
    return run


def test_it_carries_models_and_studies(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for model in shipped.MODELS:
        assert [name for name in names if re.fullmatch(rf"flows/shipped/data/{model}/\w*model.safetensors", name)], (
            model
        )
    carried = {Path(name).name for name in names if name.startswith("flows/shipped/studies/")}
    assert carried == {path.name for path in (ROOT / "studies").glob("*.toml")}
    assert wheel.stat().st_size < 24e6


def test_tiny_runs_in_an_empty_folder_and_has_the_fingerprints_of_a_checkout(
    turnwise: Turnwise, tmp_path: Path
) -> None:
    ready = turnwise(tmp_path, "doctor")
    assert ready.returncode == 0 and "The demo can run" in ready.stdout, ready.stdout + ready.stderr
    assert list(tmp_path.iterdir()) == []  # it changes nothing
    done = turnwise(tmp_path, "run", "tiny", "--plain")
    assert done.returncode == 0, done.stderr
    assert "data/base is copied from the installed package." in done.stderr
    assert done.stderr.count("is copied") == 1
    from stages.llm.hf import model_hash

    assert model_hash(str(tmp_path / "data" / "base")) == model_hash(str(ROOT / "data" / "base"))
    # Run by this checkout in the same folder, every stage is reused: it has the same fingerprint.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    again = [sys.executable, "-m", "turnwise", "run", "tiny", "--plain", "--dry-run"]
    told = subprocess.run(again, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    assert " 0 of " in f" {told.splitlines()[-1]}", told.splitlines()[-1]
    # A tab in a shell names the run, the presets and the stages.
    shell = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": " ", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}

    def tab(line: str) -> list[str]:
        out = tmp_path / "completions"
        told = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
        turnwise(tmp_path, "--version", **shell, **told)
        return out.read_text().split(" ")

    run_id = done.stdout.splitlines()[-1].split()[1]
    assert run_id in tab("turnwise show ")
    assert tab("turnwise run tin") == ["tiny"]
    assert tab("turnwise run desk+hi") == ["desk+hindsight"]
    assert set(tab("turnwise rerun c")) == {"collect", "critic"}
    assert "doctor" in tab("turnwise d")


def test_a_study_of_the_wheel_is_found_and_a_module_runs(turnwise: Turnwise, tmp_path: Path) -> None:
    study = turnwise(tmp_path, "study", "studies/tiny.toml", "--dry-run")
    assert study.returncode == 0, study.stderr
    assert turnwise(tmp_path, "study", "studies/none.toml", "--dry-run").returncode == 2
    assert turnwise(tmp_path, "-m", "turnwise", "presets").stdout.startswith("tasks")
