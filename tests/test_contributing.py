"""The files for contributors: they are YAML, and what they run or name is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from documents import ROOT, command_problem, commands, problem, spans, text_of

WORKFLOW = ROOT / ".github/workflows/ci.yml"
HOOKS = ROOT / ".pre-commit-config.yaml"
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def read(file: Path) -> Any:
    return yaml.safe_load(text_of(file))


def test_the_workflow_runs_targets_of_the_makefile_with_the_least_privileges() -> None:
    workflow = read(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert "permissions" not in job
    lines = [step["run"] for step in job["steps"] if "run" in step]
    assert {"make check", "make test"} <= set(lines)
    assert not {line: said for line in lines if (said := command_problem(line))}
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@(v\d+\.\d+\.\d+|[0-9a-f]{40})", one) for one in used)


def test_the_hooks_run_what_make_check_runs() -> None:
    makefile = text_of(ROOT / "Makefile")
    (repo,) = read(HOOKS)["repos"]
    assert repo["repo"] == "local"
    for hook in repo["hooks"]:
        assert hook["language"] == "system"
        program, *words = hook["entry"].split()
        assert program.startswith(".venv/bin/"), hook
        script = [word for word in words if word.endswith(".py")]
        assert all((ROOT / word).is_file() for word in script)
        tool = " ".join([program.removeprefix(".venv/bin/"), *(word for word in words if word != "--force-exclude")])
        assert f"$(BIN)/{tool}" in makefile, tool


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_the_forms_of_issues_are_ones_that_github_takes(form: Path) -> None:
    fields = read(form)
    assert {"name", "description", "body"} <= set(fields)
    ids = [part["id"] for part in fields["body"]]
    assert len(ids) == len(set(ids))
    assert all(part["type"] in ("textarea", "input", "dropdown", "checkboxes") for part in fields["body"])
    assert all(part["attributes"]["label"] for part in fields["body"])


def test_a_bug_comes_with_what_doctor_prints() -> None:
    parts = {part["id"]: part for part in read(ROOT / ".github/ISSUE_TEMPLATE/bug.yml")["body"]}
    assert "turnwise doctor" in parts["doctor"]["attributes"]["label"]
    assert parts["doctor"]["validations"]["required"]


def test_what_the_page_for_contributors_names_is_there() -> None:
    page = ROOT / "CONTRIBUTING.md"
    assert not {line: said for line in commands(page) if (said := command_problem(line))}
    named = [
        span for span in spans(page) if span.startswith(("make ", "turnwise ")) or ("/" in span and " " not in span)
    ]
    assert named
    assert not {span: said for span in named if (said := problem(span))}
