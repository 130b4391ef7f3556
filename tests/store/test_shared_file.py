"""`turnwise.toml`: what it may say, what is refused in a sentence, and that a project without it loads nothing for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import RUN
from toys import ENVIRONMENT

from flows.workspace import stores
from stages.frame.types import UsageError
from stages.store.shared import FILE, Shared, shared_store
from stages.store.sqlite import SqliteFile

URI, PLACE = "postgresql://anna@db.lab/turnwise", "s3://runs/desk"


def written(home: Path, uri: str = URI, artifacts: str = PLACE) -> Path:
    (home / FILE).write_text(f'[tracking]\nuri = "{uri}"\nartifacts = "{artifacts}"\n')
    return home


def test_it_names_a_database_and_a_place(tmp_path: Path) -> None:
    assert shared_store(written(tmp_path)) == Shared(URI, PLACE)
    assert shared_store(written(tmp_path, artifacts="s3://runs/")) == Shared(URI, "s3://runs")
    assert shared_store(written(tmp_path, "postgresql:///turnwise", "/mnt/runs")) == Shared(
        "postgresql:///turnwise", "/mnt/runs"
    )


def test_without_it_the_store_is_the_folders_own(tmp_path: Path) -> None:
    assert shared_store(tmp_path) is None
    assert isinstance(stores(tmp_path).tracking.db, SqliteFile)
    (tmp_path / FILE).write_text("# nothing yet\n")
    assert shared_store(tmp_path) is None


@pytest.mark.parametrize(
    ("uri", "artifacts"),
    [
        ("postgresql://anna:hidden@db.lab/turnwise", PLACE),
        ("postgresql://db.lab/turnwise?user=anna&password=hidden", PLACE),
        ("http://anna:hidden@mlflow.lab", PLACE),
        (URI, "s3://key:hidden@runs/desk"),
        (URI, "s3://hidden@runs/desk"),
    ],
)
def test_a_secret_is_refused_and_not_shown(tmp_path: Path, uri: str, artifacts: str) -> None:
    with pytest.raises(UsageError, match=r"without a password, found one with it.*PGPASSWORD") as told:
        shared_store(written(tmp_path, uri, artifacts))
    assert "hidden" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tracking", "cannot be read"),
        ("[tracking]\n", r'wanted the two texts uri = "..." and artifacts'),
        ("tracking = 1", "wanted the two texts"),
        (f'[tracking]\nuri = "{URI}"\n', "wanted the two texts"),
        (f'[tracking]\nuri = "{URI}"\nartifacts = 3\n', "wanted the two texts"),
        ("[traking]\n", "wanted the section .tracking. only, found 'traking'"),
        (
            '[tracking]\nuri = "http://mlflow.lab"\nartifacts = "s3://runs"',
            "found an MLflow server. No other store is shared",
        ),
        ('[tracking]\nuri = "mysql://db/x"\nartifacts = "s3://runs"', "found 'mysql'"),
        (
            f'[tracking]\nuri = "{URI}"\nartifacts = "runs"',
            "wanted s3://BUCKET/PREFIX or an absolute path, found 'runs'",
        ),
        (f'[tracking]\nuri = "{URI}"\nartifacts = "s3://"', "wanted s3://BUCKET/PREFIX"),
    ],
)
def test_what_else_is_wrong_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UsageError, match=said) as told:
        shared_store(tmp_path)
    assert "\n" not in str(told.value)


def test_a_database_is_named_without_its_user(tmp_path: Path) -> None:
    tracking = stores(written(tmp_path)).tracking
    assert (str(tracking.db), tracking.uri) == ("postgresql://db.lab/turnwise", URI)


def test_a_project_without_it_imports_nothing_for_it(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from flows.workspace import stores
assert stores(Path(sys.argv[1])).tracking.finished_runs() == []
print(sorted({"psycopg2", "boto3", "mlflow", "sqlalchemy", "stages.store.postgres", "stages.store.bucket"} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_command_of_the_embedded_default_imports_nothing_of_a_cluster(fresh: Path) -> None:
    script = """
import sys
from turnwise import cli
assert cli.main(sys.argv[1:]) == 0
print(sorted({"ray", "boto3", "botocore", "psycopg2", "prefect"} & sys.modules.keys()), file=sys.stderr)
"""
    command = [sys.executable, "-c", script, *RUN, "--dry-run", "--home", str(fresh)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
    assert '"collect"' in done.stdout
