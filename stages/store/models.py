"""Adapters as versions of registered models, through the MLflow client that `tracking` hands in.

A version's source is an absolute path: in a moved project folder it has to be registered again, by the run that is
repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote


@dataclass(frozen=True)
class Version:
    """A version of a registered model."""

    name: str
    number: int

    @property
    def link(self) -> str:
        """Its page, relative to MLflow's own."""
        return f"#/models/{quote(self.name)}/versions/{self.number}"


def register(client: Any, name: str, source: str, run_id: str, tags: Mapping[str, str], note: str) -> Version:
    """The version of that source, made where there is none yet. To be called by one process at a time."""
    name = name.replace(":", "_")  # which MLflow takes for the start of a version
    if not client.search_registered_models(f"name = {_quoted(name)}", max_results=1):
        client.create_registered_model(name)
    for one in client.search_model_versions(f"name = {_quoted(name)}"):
        if one.source == source:
            return Version(name, int(one.version))
    made = client.create_model_version(
        name, source, run_id=run_id, tags=dict(tags), description=note, await_creation_for=0
    )
    return Version(name, int(made.version))


def sources(client: Any) -> set[str]:
    """Ids of the runs that the versions' adapters are artifacts of."""
    found, token = set(), None
    while True:
        page = client.search_model_versions("", page_token=token)
        found |= {Path(one.source).parts[-3] for one in page}
        if not (token := page.token):
            return found


def _quoted(text: str) -> str:
    return f'"{text}"' if "'" in text else f"'{text}'"
