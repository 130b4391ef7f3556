"""What the critic's roles do at run time: each action is judged, and rewritten where the critic says No, before it is taken.
No distillation.

    turnwise run demo
    python -m benchmarks.evidence.act_with_refiner RUN --episodes 200

RUN: a finished pipeline run of NLAC. On the same scenarios of the test split four arms: the base model and the final
policy (ReAct prompting), each as it is and with the refiner, who reads the critic of the final iteration. An arm is a run
of the stage evaluate, reused where it is there. tokens: generated in an episode, by all roles.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.evidence.finals import final_evaluation
from benchmarks.passes import table_head, table_row
from flows.workspace import find_home, open_workspace
from stages import evaluate
from stages.frame.contract import Context, Outputs
from stages.frame.types import Completion, Message, Request, Scenario, UsageError
from stages.judge.fresh import unreadable
from stages.judge.refinement import Refinement
from stages.llm.roles import mix, roles_of
from stages.play.transitions import Transition
from stages.refine import RefineConfig, judge_all, refine_all
from stages.store.execute import execute
from stages.store.workspace import StageRun, Workspace

VERSION = 1000  # of evaluate with the refiner: another result, so another stage


class Rewriting:
    """An engine whose policy's replies are rewritten where the critic says No."""

    def __init__(self, context: Context, config: RefineConfig) -> None:
        self._engine, self._said = context.engine, dict[tuple[int, ...], Sequence[Message]]()
        self._context = replace(context, config=config)
        self._roles, self._asked = roles_of(context.run.roles), 0

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # replies are rewritten a batch at a time
            raise AttributeError(name)
        return getattr(self._engine, name)

    def encode_all(self, chats: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
        found = self._engine.encode_all(chats)
        self._said.update(zip(found, chats, strict=True))
        return found

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        replies = self._engine.generate(requests)
        self._asked += 1
        context = replace(self._context, seed=mix(self._context.seed, "act", self._asked))
        fresh = [
            Refinement(_state(self._said[request.prompt_ids]), request.prompt_ids, reply)
            for request, reply in zip(requests, replies, strict=True)
        ]
        fresh = [replace(r, dropped=unreadable(context, r.state, r.action)) for r in fresh]
        refined = refine_all(context, self._roles, judge_all(context, self._roles, fresh))
        # A reply that could not be judged or rewritten is taken as it is.
        better = {id(r.action): r.learned for r in refined if r.learned and not r.dropped}
        return [better.get(id(reply)) or reply for reply in replies]


def _state(messages: Sequence[Message]) -> Transition:
    """Of a state nothing but what was said there is read."""
    none = Scenario("", "", "", {})
    return Transition("", 0, none, tuple(messages), (), "", "", "", 0.0, False, False, (), (), 0.0, ())


def acting(config: RefineConfig, context: Context) -> Outputs:
    """The stage evaluate, whose policy acts with the refiner."""
    return evaluate.run(replace(context, engine=Rewriting(context, config)))


def arm(workspace: Workspace, run: str, episodes: int, *, base: bool, rewrites: bool) -> StageRun:
    sets = ["evaluate.split=test", f"evaluate.episodes={episodes}", "evaluate.audit_turns=0", 'evaluate.probe_path=""']
    again = final_evaluation(workspace, run, sets, of="its final critic")
    call, stage = again.call, evaluate.STAGE
    if not call.inputs.get("critic"):
        raise UsageError(f"wanted a run with a critic that speaks, found method {call.run.method}")
    if rewrites:
        roles = ("policy", "successor", "evaluator", "refiner", "corrector")
        whole: Any = call.run  # which sections it has is known at run time alone
        refine: RefineConfig = whole.refine
        stage = replace(stage, version=VERSION + stage.version, run=partial(acting, refine), roles=roles)
    inputs = {name: runs for name, runs in call.inputs.items() if name == "critic" or not base}
    return execute(stage, run=call.run, inputs=inputs, iteration=call.iteration, workspace=workspace, tags=again.tags)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--episodes", type=int, default=200, help="scenarios of the test split")
    args = parser.parse_args()
    workspace = open_workspace(find_home())
    table_head("who acts", "win rate", "95 %", "tokens an episode")
    for name, base, rewrites in (
        ("base", True, False),
        ("base, with the refiner", True, True),
        ("final policy", False, False),
        ("final policy, with the refiner", False, True),
    ):
        metrics = arm(workspace, args.run, args.episodes, base=base, rewrites=rewrites).metrics
        low, high = metrics["evaluate/win_low"], metrics["evaluate/win_high"]
        tokens = metrics["evaluate/generated_tokens"] / metrics["evaluate/episodes"]
        table_row(name, f"{metrics['evaluate/win_rate']:.2f}", f"{low:.2f}-{high:.2f}", f"{tokens:.0f}")


if __name__ == "__main__":
    main()
