"""A thousand bad command lines and files, by a seed: one sentence each, an exit status, and a store as it was."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import sqlite3
import string
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import parts
from turnwise import cli

TRIES = 1000
LETTERS = string.ascii_letters + string.digits + "äß漢\u2028\x1b\n\t \"'\\{}[]=.,-_/*%$"
COMMANDS = ("run", "plan", "rerun", "stages", "runs", "show", "export", "data", "gc", "verify", "ui", "serve", "init", "study", "claims", "pretrain")  # fmt: skip
# The wrong of a key's type, whatever the letters.
KEYS = ("iterations", "seed", "collect.episodes", "critic.lr", "distill.epochs", "model.lora_rank", "task.max_turns", "roles.policy_temperature")  # fmt: skip
LINES = ("[task", "seed = ", 'model = "x"', "[[critic]]", "iterations = 1979-05-27", "seed = nan", "a.b.c = 1", "extends = 3", "x = " + "[" * 5000, "seed = " + "9" * 5000)  # fmt: skip
NUMBERS = {"--limit": ["runs"], "--port": ["ui"], "--keep": ["gc"], "--only": ["claims"], "--jobs": ["claims"], "--devices": ["plan", "tiny"]}  # fmt: skip

Line = Callable[[random.Random, Path], list[str]]


def word(draw: random.Random) -> str:
    """Something that is the name of nothing."""
    return "q" + "".join(draw.choices(LETTERS, k=draw.choice([1, 3, 8, 300])))


def bad_file(draw: random.Random, folder: Path) -> str:
    file = folder / f"f{draw.randrange(10**9)}.toml"
    text = (parts.FOLDER / "tasks" / "tiny.toml").read_bytes()
    content = draw.choice(
        [
            draw.randbytes(draw.choice([1, 40, 400])) + b"\n=",
            text[: draw.randrange(20, len(text))] + b'\n"',
            draw.choice(LINES).encode() + b"\n",
            text + f'\n[{word(draw)!r}]\nx = 1\n'.encode("utf-16"),
            f'extends = "{file.name}"\n[critic]\n{draw.choice("xyz")}{draw.randrange(99)} = 1\n'.encode(),
        ]
    )  # fmt: skip
    file.write_bytes(content)
    return str(file)


def no_number(draw: random.Random) -> list[str]:
    option = draw.choice(list(NUMBERS))
    return [*NUMBERS[option], option, word(draw)]


BAD: dict[str, Line] = {
    "no such command": lambda draw, folder: [word(draw)],
    "no such option": lambda draw, folder: [draw.choice(COMMANDS), "--" + word(draw)],
    "no such preset": lambda draw, folder: ["run", word(draw), "--dry-run"],
    "no such preset file": lambda draw, folder: ["plan", f"{word(draw)}.toml"],
    "a preset file": lambda draw, folder: ["run", bad_file(draw, folder), "--dry-run"],
    "a plan of one": lambda draw, folder: ["plan", bad_file(draw, folder)],
    "a study file": lambda draw, folder: ["study", bad_file(draw, folder), "--dry-run"],
    "no such key": lambda draw, folder: ["run", "tiny", "--dry-run", "--set", f"{word(draw)}={word(draw)}"],
    "no such value": lambda draw, folder: ["run", "tiny", "--dry-run", "--set", f"{draw.choice(KEYS)}={word(draw)}"],
    "no value": lambda draw, folder: ["plan", "tiny", "--set", draw.choice(["seed", "=", ".", "a..b=1", "seed.x=1", ""])],
    "no such run": lambda draw, folder: draw.choice([["show", word(draw)], ["export", word(draw), "out"]]),
    "a rerun of none": lambda draw, folder: ["rerun", draw.choice(["critic", word(draw)]), "--of", word(draw)],
    "no such stage": lambda draw, folder: ["stages", word(draw)],
    "no such device": lambda draw, folder: ["plan", "tiny", "--device", word(draw)],
    "an assumption": lambda draw, folder: ["plan", "tiny", "--assume", f"{word(draw)}={word(draw)}"],
    "no such data": lambda draw, folder: ["data", "fetch", draw.choice([word(draw), "game24"]), "--from", word(draw)],
    "no such folder": lambda draw, folder: [draw.choice(["runs", "verify", "gc", "init"]), "--home", word(draw)],
    "no number": lambda draw, folder: no_number(draw),
    "a number out of range": lambda draw, folder: draw.choice(
        [["runs", "--limit", "-3"], ["gc", "--keep", "0"], ["serve", "--limit", "0"], ["ui", "--port", "70000"], ["claims", "--only", "99"]]
    ),
    "a public address": lambda draw, folder: [draw.choice(["ui", "serve"]), "--host", "0.0.0.0"],
}  # fmt: skip


def run(argv: list[str]) -> tuple[int, str]:
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = cli.main(argv)
        except SystemExit as end:
            status = int(end.code or 0)
    return status, err.getvalue()


def kept(home: Path) -> set[str]:
    """Every file with its content, and every line of MLflow's database, whose own files change as it is opened."""
    db = home / "mlflow" / "mlflow.db"
    files = [path for path in home.rglob("*") if path.is_file() and db.stem != path.stem]
    with contextlib.closing(sqlite3.connect(db)) as connection:
        return {*(f"{path}: {path.read_bytes()!r}" for path in files), *connection.iterdump()}


@pytest.mark.slow
def test_a_thousand_bad_commands_are_one_sentence_each_and_leave_the_store(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, files = random.Random(0), tmp_path_factory.mktemp("files")
    (home / "data").mkdir()
    monkeypatch.chdir(home)
    before = kept(home)
    for number in range(TRIES):
        kind = list(BAD)[number % len(BAD)]
        argv = BAD[kind](draw, files)
        status, err = run(argv)
        told = f"{number} {kind}: {argv} -> {status}: {err}"
        assert status in (1, 2), told
        assert err.startswith("turnwise: ") and err.endswith("\n") and err[:-1].isprintable(), told
        assert len(err) < 2000, told
    assert kept(home) ^ before == set()
    shutil.rmtree(files)
