"""Lists the stages, the order in which a method runs them, and the runs that each one reads.

To add a stage: its module in `stages/`, its name in STAGES, and its name in a METHOD with its WIRING.
A stage is imported when it is asked for, which keeps the command line fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from stages.frame.contract import Stage

STAGES: dict[str, str] = {
    name: f"stages.{name}"
    for name in (
        "pretrain", "collect", "targets", "critic", "refine", "pick", "q_critic", "distill", "rft", "grpo", "sdpo", "self_ac", "evaluate",
    )
}  # fmt: skip
"""Stage name -> module that exports it as STAGE. The name is also its section of a preset."""

METHODS: dict[str, tuple[str, ...]] = {
    "nlac": ("collect", "targets", "critic", "refine", "distill"),
    "hindsight": ("collect", "refine", "distill"),
    "nlql": ("collect", "targets", "critic", "pick", "distill"),
    "nlrl": ("collect", "pick", "distill"),
    "sac": ("collect", "q_critic", "pick", "distill"),
    "rft": ("collect", "rft"),
    "grpo": ("collect", "grpo"),
    "sdpo": ("collect", "sdpo"),
    "self_ac": ("collect", "self_ac"),
}
"""Method -> its stages within one iteration, in order. The last one makes the adapter that is evaluated."""

SWEPT = ("targets", "critic", "q_critic")
"""Stages of every iteration. With several `sweeps`, other stages come once in that many iterations."""

Which = Literal["all", "last", "newest"]

_POLICIES: dict[str, Which] = {"distill": "last", "rft": "last", "grpo": "last", "sdpo": "last", "self_ac": "last"}

_LEARNERS = ("critic", "q_critic", "distill")  # which train one adapter in turn

WIRING: dict[str, dict[str, Which]] = {
    "pretrain": {},
    "collect": _POLICIES,
    "targets": {"collect": "all", "critic": "all", "distill": "newest"},
    "critic": {"targets": "last", "collect": "all", "refine": "last", "pick": "last", "critic": "newest", "distill": "newest"},
    "refine": {"collect": "all", "critic": "all", "distill": "newest"},
    "q_critic": {"collect": "all", "q_critic": "all", "pick": "last", "distill": "newest"},
    "pick": {"collect": "all", "critic": "all", "q_critic": "all", "distill": "newest"},
    "distill": {"refine": "last", "pick": "last", "targets": "last", "critic": "last", "q_critic": "last", "distill": "newest"},
    "rft": {"collect": "all", "rft": "last"},
    "grpo": {"collect": "last", "grpo": "last"},
    "sdpo": {"collect": "last", "sdpo": "last"},
    "self_ac": {"collect": "last", "self_ac": "last"},
    "evaluate": {**_POLICIES, "critic": "last", "q_critic": "last"},
}  # fmt: skip
"""Stage -> upstream stage -> "all" of its runs so far or only the "last". "newest": the last one, unless another stage has trained the same adapter since.
Upstream stages without a run yet are left out."""

READS: dict[str, tuple[str, ...]] = {
    "collect": tuple(_POLICIES),
    "targets": ("distill", "critic"),
    "critic": ("distill", "critic"),
    "refine": ("critic", "distill"),
    "q_critic": ("distill", "q_critic"),
    "pick": ("critic", "q_critic", "distill"),
    "distill": ("critic", "q_critic", "distill"),
    "rft": ("rft",),
    "grpo": ("grpo",),
    "sdpo": ("sdpo",),
    "self_ac": ("self_ac",),
    "evaluate": (*_POLICIES, "critic", "q_critic"),
}
"""Stage -> upstream stages whose weights it reads, from the newest run of each. A swept stage reads those of the first
one that exists. From all others it reads only rows.
"""


def read_weights(stage: str, inputs: Mapping[str, Sequence[str]]) -> list[str]:
    """The runs among a stage's inputs from which it reads weights."""
    found = [inputs[name][-1] for name in READS.get(stage, ()) if inputs.get(name)]
    return found[:1] if stage in SWEPT else found


def load_stage(name: str) -> Stage:
    """The stage of that name. Its module must export STAGE."""
    stage: Stage = importlib.import_module(STAGES[name]).STAGE
    return stage


def select_inputs(stage: str, history: dict[str, list[str]], lag: int = 0) -> dict[str, list[str]]:
    """The inputs of `stage`. lag: of collect, policies that it leaves out, the newest first. history: the pipeline's runs so far (stage name -> run ids, oldest first); the stage that
    ran last comes last.

    Within an iteration, "last" is this iteration's run if that stage has run already, else the one before.
    """
    if stage == "collect" and lag:
        history = {name: runs[:-lag] for name, runs in history.items()}
    learner = next((name for name in reversed(history) if name in _LEARNERS), None)
    return {
        name: list(history[name]) if which == "all" else history[name][-1:]
        for name, which in WIRING[stage].items()
        if history.get(name) and (which != "newest" or name == learner)
    }
