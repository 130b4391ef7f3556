"""First run, rerun, compare, export, schedule, upkeep: every command that these pages show, run in their order in a small project,
with real servers.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path

import pytest
from commands import RUN, make_home
from documents import DOCS, FENCE, blocks, text_of
from serving import _take_interrupts

from stages.store.replay import Replay
from stages.store.tracking import Tracking
from turnwise import cli

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent
SERVING = ("serve", "ui")
SHOWN = (
    "tutorial/first-run",
    *(f"how-to/{name}" for name in ("rerun", "compare", "export", "schedule", "upkeep")),
)
PROGRAMS = "turnwise|export|mkdir|tar|PREFECT_API_URL"
UNDER_PREFECT = ("run", "rerun")  # in processes of their own: they are told of a server, and that one ends


def shown() -> list[str]:
    """The commands that stand in indented blocks of the pages, in order."""
    found = []
    for name in SHOWN:
        text = FENCE.sub("", text_of(DOCS / f"{name}.md"))
        found += re.findall(rf"^ {{4,8}}((?:{PROGRAMS})\b.*)$", text, re.MULTILINE)
    return [line for line in found if "--seeds" not in line]  # a sweep of minutes; test_docs.py parses it


@pytest.fixture
def project(tmp_path: Path, empty_store: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two finished runs, and the page's preset on a desk that takes seconds."""
    home = make_home(tmp_path / "desk", empty_store, base)
    monkeypatch.chdir(home)
    assert cli.main([*RUN]) == 0
    assert cli.main([*RUN, "--set", "critic.lr=1e-4"]) == 0
    keys = [item for item in RUN[RUN.index("--set") + 1 :: 2] if not item.startswith("iterations")]
    quoted = [re.sub(r"=([a-z][\w/]*)$", r"='\1'", item) for item in keys]
    page = blocks("how-to/schedule.md", "toml")[0].replace("match_episodes = 400", "match_episodes = 8")
    assert 'extends = "demo"' in page
    (home / "my").mkdir()
    (home / "my" / "small.toml").write_text("\n".join(["extends = 'tiny'", "iterations = 1", *quoted]))
    (home / "my" / "nightly.toml").write_text(page.replace('extends = "demo"', 'extends = "small.toml"'))
    return home


def looked_at(project: Path) -> dict[str, str]:
    """A stage run of collect, and an episode of it."""
    run_id = Tracking(project / "mlflow").runs("collect", 1)[0].run_id
    rows = Replay(project / "data" / "turnwise.duckdb").rows("episodes", [run_id])
    return {"COLLECT": run_id[:8], "EPISODE": str(rows[0]["episode_id"])}


@contextmanager
def running(command: str, env: dict[str, str]) -> Iterator[str]:
    """A command that serves until Ctrl-C, once it says where; it ends well. Yields the port of Prefect's page."""
    with subprocess.Popen(
        shlex.split(command), stdout=subprocess.PIPE, text=True, env=env, preexec_fn=_take_interrupts
    ) as process:
        assert process.stdout is not None
        port = ""
        for line in process.stdout:  # the address of Prefect's page comes first of `serve`, last of `ui`
            found = re.match(r"prefect +http://127\.0\.0\.1:(\d+)", line)
            port = found[1] if found else port
            if port and (" serve " not in command or ".nightly " in line):
                break
        assert port, f"{command} ended before it said where it serves"
        yield port
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


def test_every_command_of_the_pages_runs(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    newest, older = (info.run_id[:8] for info in Tracking(project / "mlflow").runs("pipeline", 2))
    words = {"RUN": older, "RUN2": newest, "PROJECT": "desk", **looked_at(project)}
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    env |= {"PATH": f"{BIN}:{env['PATH']}"}
    done: set[str] = set()
    with ExitStack() as served:
        for line in shown():
            command = re.sub(r"\b[A-Z]+2?\b", lambda word: words.get(word[0], word[0]), line)
            command = command.replace("run demo", "run my/small.toml")
            command = "turnwise ui --port 0" if command == "turnwise ui" else command  # 5000 may be somebody else's
            if command in done:
                continue
            done.add(command)
            program, *rest = shlex.split(command)
            if command.startswith(("tar ", "turnwise init")):  # as the page says: while nothing runs there
                served.pop_all().close()
            if program == "export":
                name, _, value = rest[0].partition("=")
                env[name] = value
            elif program == "turnwise" and rest[0] in SERVING:
                served.pop_all().close()  # one at a time
                words["PORT"] = served.enter_context(running(command, env))
            elif program == "turnwise" and rest[0] not in UNDER_PREFECT:
                with chdir(project):
                    assert cli.main(rest) == 0, f"{line}\n{capfd.readouterr().err}"
            else:
                ended = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)
                assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
    assert len([line for line in done if line.startswith("turnwise ")]) >= 20
    assert (project.parent / "restored" / "mlflow" / "mlflow.db").exists()
