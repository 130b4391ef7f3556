"""A scripted cast for refinement, on the desk's own rules, so that it is known which action is right."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models

from stages import collect, refine
from stages.collect import CollectConfig
from stages.frame.sections import RolesConfig, TaskConfig
from stages.frame.types import Completion, Request
from stages.llm.scripted import GARBAGE, draw
from stages.refine import RefineConfig

OPTIONS = {"requests": 3, "tiers": 2}


@dataclass
class Play:
    """A scripted model. `fresh` and `better`: right or wrong actions; `critic`: "truth", "yes", "no" or "garbage"."""

    fresh: str = "wrong"
    better: str = "right"
    critic: str = "truth"
    spoiled: dict[str, str] = field(default_factory=dict)  # role -> another reply

    def __call__(self, prompt: str, request: Request) -> str:
        role = models.role_of(prompt)
        if role in self.spoiled:
            return self.spoiled[role]
        if role == "corrector":
            return models.words_of(prompt).removeprefix("Rewrite.\n").replace("as told, ", "")
        if role == "successor":
            return f"Future: then {draw(request, ['fail', 'pass', 'end', 'more'])}. {prompt.rsplit('Action: ', 1)[1].splitlines()[0]}"
        if role == "evaluator":
            return self.verdict(prompt)
        kind = self.better if role == "refiner" else self.fresh if request.adapter == "critic0-adapter" else "right"
        action = self.action(prompt, kind)
        return (
            f"Thought: as told, x. Action: {action}"
            if role == "refiner"
            else f"Thought: {request.seed % 10}. Action: {action}"
        )

    @staticmethod
    def action(prompt: str, kind: str) -> str:
        return (models.right_action if kind == "right" else models.wrong_action)(prompt, OPTIONS)

    def verdict(self, prompt: str) -> str:
        if self.critic == "garbage":
            return GARBAGE
        # service_desk's evaluator is not told the customer; the future repeats the action, whose option is known here.
        right = self.critic == "yes" if self.critic != "truth" else "RIGHT" in prompt
        return "Optimality: Yes. fine." if right else "Optimality: No. another may be needed."


class Seeing(Play):
    """The successor says whether the action is right, so that the evaluator can."""

    def __call__(self, prompt: str, request: Request) -> str:
        if models.role_of(prompt) == "successor" and not self.spoiled:
            state, action = prompt.rsplit("Action: ", 1)
            return f"Future: {'RIGHT' if action.splitlines()[0] == models.right_action(state, OPTIONS) else 'BROKEN'} {request.seed}."
        return super().__call__(prompt, request)


class Often(Seeing):
    """The same, but so many of ten replies of the policy cannot be read; which ones hangs on the request's seed."""

    def __init__(self, unreadable: int) -> None:
        super().__init__()
        self.unreadable = unreadable

    def __call__(self, prompt: str, request: Request) -> str:
        lost = (
            models.role_of(prompt) == "policy"
            and request.adapter == "critic0-adapter"
            and request.seed % 10 < self.unreadable
        )
        return GARBAGE if lost else super().__call__(prompt, request)


def bench_of(base: Path, tmp_path: Path, play: Any, episodes: int = 12, **roles: Any) -> models.Bench:
    """Episodes of a policy that does everything right, and a critic to be loaded."""
    bench = models.Bench(base, tmp_path, engine=models.Recorder(play), task=TaskConfig(options=OPTIONS))
    bench.roles = RolesConfig(max_action_tokens=400, max_future_tokens=400, **roles)
    bench.run(collect.STAGE, CollectConfig(first_episodes=episodes), {})
    for folder in ("adapter", "target"):
        bench.memory.files["critic0", folder] = tmp_path
    engine: Any = bench.engine
    engine.requests.clear(), engine.completions.clear()
    return bench


INPUTS = {"collect": ["collect0"], "critic": ["critic0"]}


def run(
    bench: models.Bench, seed: int = 0, **config: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, float]]:
    outputs = bench.run(refine.STAGE, RefineConfig(**({"states": 20, "yes_frac_max": 1.0} | config)), INPUTS, seed=seed)
    return (
        [dict(r) for r in outputs.rows["targets"]],
        [dict(r) for r in outputs.rows["judgements"]],
        dict(outputs.metrics),
    )


def asked(bench: models.Bench) -> dict[str, list[tuple[str, Request, Completion]]]:
    engine: Any = bench.engine
    found: dict[str, list[tuple[str, Request, Completion]]] = {}
    for request, completion in zip(engine.requests, engine.completions, strict=True):
        prompt = engine.decode(request.prompt_ids)
        found.setdefault(models.role_of(prompt), []).append((prompt, request, completion))
    return found
