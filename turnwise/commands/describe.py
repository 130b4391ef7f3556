"""Describes every stage's inputs, outputs and config from its own code: nothing is written down twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from flows.presets import RunConfig
from flows.registry import STAGES, load_stage
from stages.envs import nearest
from stages.frame.sections import ModelConfig, RolesConfig, ShardConfig, TaskConfig, TrainConfig
from stages.frame.types import UsageError

SHARED: dict[str, type[BaseModel]] = {
    "task": TaskConfig,
    "model": ModelConfig,
    "roles": RolesConfig,
    "train": TrainConfig,
}
SOURCE = re.compile(r"\s*\[([^\]]*)\]\s*$")


def describe(name: str | None = None) -> dict[str, Any]:
    """All stages, or the named one, with inputs, outputs, roles and config; and the shared sections."""
    if name is not None and name not in STAGES:
        raise UsageError(f"There is no stage {name!r}{nearest(name, list(STAGES))} Stages: {', '.join(STAGES)}.")
    found = {}
    for stage in (load_stage(one) for one in ([name] if name else STAGES)):
        found[stage.name] = {
            "version": stage.version,
            "what": (__import__(STAGES[stage.name], fromlist=["STAGE"]).__doc__ or "").strip().splitlines()[0],
            "inputs": list(stage.inputs),
            "outputs": list(stage.outputs),
            "roles": list(stage.roles),
            "shared": list(stage.shared),
            "config": list(fields_of(stage.config)),
        }
    shared = {
        "run": [
            *fields_of(RunConfig),
            *({**one, "key": f"run.{one['key']}"} for one in fields_of(ShardConfig)),
        ],
        **{section: list(fields_of(config)) for section, config in SHARED.items()},
    }
    return {"stages": found, "shared": {} if name else shared}


def describe_text(described: dict[str, Any]) -> str:
    """The same for a reader."""
    lines: list[str] = []
    for name, stage in described["stages"].items():
        lines += [f"{name} (version {stage['version']}): {stage['what']}"]
        lines += [
            f"  {title}: {', '.join(stage[title]) or 'none'}" for title in ("inputs", "outputs", "roles", "shared")
        ]
        lines += [*_config_lines(name, stage["config"]), ""]
    for name, fields in described["shared"].items():
        lines += [f"section {name}, which stages share:" if name != "run" else "keys of a run:"]
        lines += [*_config_lines("" if name == "run" else name, fields), ""]
    return "\n".join(lines).rstrip()


def _config_lines(section: str, fields: list[dict[str, Any]]) -> Iterator[str]:
    for one in fields:
        key = f"{section}.{one['key']}" if section else one["key"]
        yield f"  {key} = {one['default']!r}  {one['what']} [{one['source']}]"


def fields_of(config: type[BaseModel]) -> Iterator[dict[str, Any]]:
    """Every key with default, type, meaning and unit, and where the default comes from ([paper], [ours], ...)."""
    schema = config.model_json_schema(mode="serialization")
    for key, info in config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            continue  # a section of its own
        text = info.description or ""
        source = SOURCE.search(text)
        named = schema["properties"][key].items()
        shape = {name: value for name, value in named if name not in ("title", "description", "default")}
        default = info.get_default(call_default_factory=True)
        yield {
            "key": key,
            "default": default,
            "type": shape,
            "what": SOURCE.sub("", text),
            "source": source[1] if source else "ours",
        }
