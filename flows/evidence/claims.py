"""The claims of the two sources, each with the source's figure, its control here and its evidence. Ours.

NLAC's figures come from arXiv 2512.04601, by default its first version, with Qwen2.5-7B-Instruct. They are success
rates on tau-bench retail and airline. studies/claims.toml defines the methods' names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flows.evidence.kinds import CostOfAnEpisode, Elsewhere, Evidence, Higher, Larger, Metric, Passes, Printed, Sooner
from flows.evidence.programs import Program


@dataclass(frozen=True)
class Claim:
    """criterion: when it holds, where that is not a difference from the control whose interval is above 0."""

    number: int
    text: str
    source: str
    paper: str
    control: str
    rests_on: tuple[Evidence, ...]
    criterion: str = ""


THEORY = Program("pytest", ("-q", "-o", "addopts=", "-p", "no:cacheprovider", "tests/theory/test_policy_improvement.py", "tests/theory/test_successor_features.py"))  # fmt: skip
INFERENCE = Program("benchmarks.speed.inference_cost", ("--pairs", "5"))
PACKED = Program("benchmarks.speed.packed_pass", ("--critic", "4", "--width", "768", "--layers", "2", "--pairs", "6"))
PER_TURN = Program("benchmarks.speed.per_turn", ("--turns", "8"))
VALUE = Program("benchmarks.evidence.value_use", ("RUN", "--episodes", "100"), of="by turn")

ONE_ANSWER = ("combine", "evaluator", "corrector")
"""Roles of which a held-out prompt in a random world has one right answer; what the others say there is a matter of luck."""


def _known(method: str, role: str) -> tuple[Metric, Metric]:
    """What a method's model still answers right, and what its base did."""
    return Metric(method, key := f"evaluate/probe_{role}"), Metric(method, key, "base")


BASELINES = ("rft", "grpo", "ppo", "nlrl")

BESIDE = Elsewhere("width", "27", Higher("nlac", ("sdpo",)), decides=False)
"""SDPO learns from the same words without a critic. The desk's base model cannot read its message, that of the wide desk can."""

CLAIMS = (
    Claim(
        1, "NLAC ends higher than RFT, PPO, GRPO and NLRL (the source: on long horizons).", "NLAC, Table 1", ".42 and .22 against .21 to .28 and .11 to .16",
        "each of the four, tuned alike in studies/table1.toml, on a desk of three steps, as here, and on a long one. `parser` is told the same words and has no critic",
        (Higher("nlac", (*BASELINES, "parser")), BESIDE),
    ),
    Claim(
        2, "It needs fewer episodes.", "NLAC, section 6", "no figure here", "the same four and `parser`",
        (Sooner("nlac", (*BASELINES, "parser")), replace(BESIDE, evidence=Sooner("nlac", ("sdpo",)))), "fewer in every pair of runs",
    ),
    Claim(
        3, "A critic that speaks beats one that is a number.", "NLAC, Table 1", ".42 and .22 against .18 and .11", "`sac`: the same episodes, its Q of the reward alone; and `sac, told`, paid for each step that the audit does not blame; both tuned in studies/scalar.toml",
        (Higher("nlac", ("sac", "sac, told")), BESIDE),
    ),
    Claim(
        4, "Replay saves episodes.", "NLAC, section 4", "no figure here", "`no replay`: targets and refine draw from the newest iteration alone",
        (Higher("nlac", ("no replay",)), Sooner("nlac", ("no replay",))), "higher, and fewer in every pair of runs",
    ),
    Claim(
        5, "The trained successor matters.", "NLAC, second version", ".56 and .43, above self-distillation", "`hindsight`: what really came of the action, without the critic's stage and its steps; `frozen`: a successor that is never trained",
        (Higher("nlac", ("hindsight", "frozen")), replace(BESIDE, evidence=Higher("nlac", ("hindsight", "sdpo")))),
    ),
    Claim(
        6, "Rewriting beats picking the best judged of 4.", "NLAC, second version", "above NLQL", "`nlql`: the same critic, no refiner",
        (Higher("nlac", ("nlql",)),),
    ),
    Claim(
        7, "CoT correction takes out of targets what only hindsight knows.", "NLAC, section 4", "no figure here", "the same texts before correction; `uncorrected`: a run without it",
        (
            Larger("share of targets that name what was not known yet, before and after", Metric("nlac", "targets/leak_name_before", "mean"), Metric("nlac", "targets/leak_name_after", "mean")),
            Larger("order of the verdict (AUROC), and without correction", Metric("nlac", "audit/verdict_auroc"), Metric("uncorrected", "audit/verdict_auroc"), decides=False),
            Larger("win rate, and without", Metric("nlac", "evaluate/win_rate"), Metric("uncorrected", "evaluate/win_rate"), decides=False),
        ),
    ),
    Claim(
        8, "The critic's order of actions agrees with Q.", "NLAC, theorem 5.1", "proved for an exact backup", "chance, .5; and `frozen`, the critic before it learned anything",
        (
            Larger("AUROC of the verdict against Q*, and chance", Metric("nlac", "audit/verdict_auroc"), 0.5),
            Larger("... and of a critic that is never trained", Metric("nlac", "audit/verdict_auroc"), Metric("frozen", "audit/verdict_auroc")),
        ),
    ),
    Claim(
        9, "Backup and refinement reach the optimal policy.", "NLAC, theorem 5.2", "proved", "value iteration and Howard's policy iteration, on solved worlds",
        (Passes("tests:", THEORY),), "all of these tests pass",
    ),
    Claim(
        10, "What the model knew is forgotten within bounds.", "NLAC, section 7", "general data is mixed in, and training stops at the peak",
        "the base model on the same held-out prompts, of the roles that have one right answer; and `nlac`, into which nothing is mixed",
        (
            *(Larger(f"{role} prompts answered, and by the base", *_known("general rows", role), by=-0.1) for role in ONE_ANSWER),
            *(Larger(f"{role} without general rows", *_known("nlac", role), decides=False) for role in ONE_ANSWER),
            Larger("win rate, and without", Metric("general rows", "evaluate/win_rate"), Metric("nlac", "evaluate/win_rate"), decides=False),
        ),
        "at most .1 below, each",
    ),
    Claim(
        11, "An episode costs more, the whole way less.", "NLAC, section 6", "6 to 8 generations a target", "RFT and GRPO to the same win rate",
        (CostOfAnEpisode("nlac", ("rft", "grpo")),), "less processor time in every pair of runs",
    ),
    Claim(
        12, "Few parameters are added, and after merging inference is the plain model's.", "Self-AC", "LoRA and one head", "the base model itself, run twice",
        (
            Printed("added, of a model of 7B:", INFERENCE, lambda said: said.cell("share", "shape of Qwen2.5-7B")),
            Printed("tokens a second, merged over base:", INFERENCE, lambda said: said.cell("ratio", "merged"), least=0.95),
        ),
        "at least .95 of the tokens a second",
    ),
    Claim(
        13, "A training step costs almost what GRPO's does.", "Self-AC", "almost identical", "GRPO's cheapest pass over the same episodes",
        (Printed("Self-AC over GRPO, 8 turns, prompt of 4 tokens, width 768:", PACKED, lambda said: said.cell("ratio"), most=1.1),), "at most 1.1 times",
    ),
    Claim(
        14, "It costs far less than an actor-critic that reads the history anew for each turn.", "Self-AC", "as many times as there are turns", "that one, with equal losses and gradients",
        (Printed("per turn over Self-AC, 8 turns:", PER_TURN, lambda said: said.cell("ratio"), least=2.0),), "at least 2 times",
    ),
    Claim(
        15, "Credit by turn learns better than credit by episode.", "Self-AC", "a promise, no figure", "`by episode`: GRPO's advantage; the same draws, scale, price and steps",
        (Higher("by turn", ("by episode",)),),
    ),
    Claim(
        16, "The value function can be used.", "Self-AC", "search, best of n, early abort", "the same values dealt to other episodes",
        (
            Printed(
                "tokens saved by early abort, and with values dealt anew:", VALUE, lambda said: said.cell("tokens saved", "V"),
                more_than=lambda said: said.cell("tokens saved", "V dealt anew"),
            ),
            Printed("wins lost by it:", VALUE, lambda said: said.cell("wins lost", "V")),
        ),
        "more tokens saved than with values dealt anew",
    ),
    Claim(
        17, "Where a step has many actions, a reason is worth more than a verdict.", "NLAC, sections 1 and 4.2", "large action spaces, no figure", "the same critic, whose refiner reads its No alone, with one rewrite and with several and a gate; `sdpo` and `parser` read the same words without a critic",
        (
            Elsewhere("width", "243", Higher("nlac", ("verdict only", "verdict only, gated"))),
            Elsewhere("width", "243", Higher("nlac", ("sdpo", "parser")), decides=False),
        ),
        "on 243 actions, in studies/width.toml",
    ),
)  # fmt: skip
