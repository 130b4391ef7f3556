"""What a flow run's page shows of its pipeline: the iterations with their curve, the result, and a link to MLflow's run.

One Markdown artifact a flow run, made after the first iteration and kept up to date.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast
from uuid import UUID

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.logging import get_logger
from prefect.runtime import flow_run

from flows.orchestration.server import stored_port
from flows.report import bar, sparkline
from flows.telling import Iteration, Summary, match_text, rate_text

MLFLOW_PORT = 5000  # where `turnwise ui` serves MLflow's page unless it is told otherwise


class Page:
    """The artifact of the flow run that this process is in."""

    def __init__(self, home: Path, link: str) -> None:
        """link: to MLflow's run, relative to its page."""
        self._link = f"{mlflow_page(home)}/{link}"
        self._rows: list[Iteration] = []
        self._artifact: UUID | None = None

    def add(self, row: Iteration) -> None:
        self._rows.append(row)
        self._show()

    def end(self, summary: Summary) -> None:
        self._show(summary)

    def _show(self, summary: Summary | None = None) -> None:
        text = markdown([(row.iteration, row.metrics) for row in self._rows], self._link, summary)
        try:
            self._put(text)
        except Exception as error:  # whatever is wrong with the page, the run goes on
            get_logger("turnwise").warning("The flow run's page was not brought up to date (%s).", type(error).__name__)

    def _put(self, text: str) -> None:
        if self._artifact is None:
            made = create_markdown_artifact(text, key="iterations", description="Iterations and their curve")
            self._artifact = cast("UUID", made)  # a coroutine only where it is called from one
            return
        with get_client(sync_client=True) as client:
            client.update_artifact(self._artifact, ArtifactUpdate(data=text))


def here() -> dict[str, str]:
    """Tags that lead from MLflow's run back to the flow run that this process is in."""
    return {"prefect_run": str(flow_run.id), "prefect_page": str(flow_run.ui_url)}


def markdown(rows: Sequence[tuple[int, Mapping[str, float]]], link: str, summary: Summary | None = None) -> str:
    """A row an iteration: number, metrics by name. link: to MLflow's run."""
    rates = [metrics["evaluate/win_rate"] for _, metrics in rows if "evaluate/win_rate" in metrics]
    lines = [f"[MLflow's run]({link}), served by `turnwise ui`.", ""]
    if rates:
        lines += [f"Validation: `{sparkline(rates)}` {rates[0]:.2f} -> {rates[-1]:.2f}, best {max(rates):.2f}.", ""]
    if summary and summary.final:
        tested = f"base model {rate_text(summary.base)}, adapter of iteration {summary.final['iteration']} {rate_text(summary.final)}"
        lines += [f"Test: {tested}.", ""]
    if summary and summary.match:
        lines += [f"Champion: {match_text(summary.match)}.", ""]
    lines += ["| iteration | win rate, 95 % | | return |", "|---|---|---|---|"]
    for number, metrics in rows:
        told = {key.removeprefix("evaluate/"): value for key, value in metrics.items() if key.startswith("evaluate/")}
        drawn = f"`{bar(told['win_rate'])}`" if told.get("win_rate") else ""
        earned = f"{metrics['collect/return']:.2f}" if "collect/return" in metrics else ""
        lines.append(f"| {'base' if number < 0 else number} | {rate_text(told)} | {drawn} | {earned} |")
    return "\n".join(lines)


def mlflow_page(home: Path) -> str:
    """Where `turnwise ui` last served MLflow's page of this folder, or the default address."""
    return f"http://127.0.0.1:{stored_port(home / 'mlflow' / 'page.json', MLFLOW_PORT)}"
