"""A URL that holds a secret is refused where the config is read: through the real command, it is in no file of the
project folder and in no line of what is printed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import RUN, Commands, make_home
from pydantic import ValidationError

from flows import presets
from stages.frame.sections import ModelConfig, TaskConfig
from stages.frame.types import UsageError

SECRET = "s3cretword"
URLS = [
    f"http://me:{SECRET}@127.0.0.1:9/v1",
    f"https://{SECRET}@example.org",
    f"http://me:{SECRET[:4]}/{SECRET}@127.0.0.1:9",
    f"me:{SECRET}@127.0.0.1:9",
    f"http://127.0.0.1:9/v1?api_key={SECRET}",
    f"http://127.0.0.1:9/v1#{SECRET}",
    f"http://me:{SECRET}@[::1/v1",
]
SAID = "wanted a base URL such as http://127.0.0.1:8000/v1, without user name or query; a key goes into OPENAI_API_KEY."


def test_a_url_without_a_secret_one_of_a_list_and_none_are_taken() -> None:
    assert ModelConfig(url="http://127.0.0.1:8000/v1").url == "http://127.0.0.1:8000/v1"
    assert ModelConfig(url=("http://a:1", "https://b/v1")).url == ("http://a:1", "https://b/v1")
    assert (ModelConfig().url, TaskConfig(oracle_url="http://[::1]:8000").oracle_url) == ("", "http://[::1]:8000")


@pytest.mark.parametrize("url", URLS)
def test_a_url_with_a_secret_is_refused_without_a_word_of_it(url: str) -> None:
    for key, value in (("model.url", f'"{url}"'), ("model.url", f'["http://a:1", "{url}"]'), ("task.oracle_url", url)):
        with pytest.raises(UsageError) as caught:
            presets.load("tiny", [f"{key}={value}"])
        assert str(caught.value) == f"{key}: {SAID}"
    for make in (lambda: ModelConfig(url=url), lambda: TaskConfig(oracle_url=url)):
        with pytest.raises(ValidationError) as refused:
            make()
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("item", ["model={}", "model.dtype={}", "{}", "model.path.x={}", "seed={}"])
def test_a_url_in_the_wrong_place_is_quoted_without_its_password(item: str) -> None:
    with pytest.raises(UsageError) as caught:
        presets.load("tiny", ["model.path=data/base", item.format(URLS[0])])
    assert SECRET not in str(caught.value)


@pytest.mark.slow
def test_no_command_leaves_or_prints_the_secret_of_a_url(
    command: Commands, empty_store: Path, base: Path, tmp_path: Path
) -> None:
    home = make_home(tmp_path / "home", empty_store, base)
    preset = tmp_path / "mine.toml"
    preset.write_text(f'extends = "tiny"\n[model]\nengine = "openai"\nurl = "{URLS[0]}"\n')
    before = files(home)
    url, oracle = f"model.url={URLS[0]}", f"task.oracle_url={URLS[0]}"
    for argv in (
        [*RUN, "--set", "model.engine=openai", "--set", url],
        [*RUN, "--set", "task.oracle=openai", "--set", oracle],
        ["run", str(preset), "--plain"],
        ["run", "tiny", "--set", url],
        ["run", "tiny", "--dry-run", "--set", oracle],
        ["plan", str(preset)],
        ["pretrain", "--set", url],
        ["serve", "--preset", str(preset)],
    ):
        done = command(home, *argv)
        assert done.status == 2, (argv, done)
        assert SAID in done.err, argv
        assert SECRET not in done.out + done.err, argv
        assert not [path for path in files(home) if SECRET.encode() in path.read_bytes()], argv
        if "--plain" in argv or argv[0] in ("plan", "pretrain"):  # the others begin to start a server at once
            assert files(home) - before <= {home / "out.txt", home / "err.txt"}, argv


def files(home: Path) -> set[Path]:
    return {path for path in home.rglob("*") if path.is_file()}
