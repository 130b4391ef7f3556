"""`perfect` of wide_desk: each role played by code that knows the optimum, against the desk's exact truth."""

from __future__ import annotations

import random

import pytest
from test_wide_desk import ANA, RUNGS, SIZES, act, phrases

from stages import envs
from stages.envs.wide_desk import WideDesk, truth
from stages.envs.wide_rules import Options, needed
from stages.envs.wide_words import STEPS, may, spoken
from stages.frame.react import parse_react
from stages.frame.types import Message, UsageError
from stages.llm.roles import load_roles, parse_evaluation, parse_future

ROLES = load_roles("wide_desk")
FIELDS = {"successor": {}, "evaluator": {"futures": ""}, "refiner": {"evaluation": "Optimality: No."}}
"""What each role's prompt holds beside the state and the action."""


def begun(env: WideDesk) -> list[Message]:
    return [{"role": "system", "content": env.system}, *env.reset(ANA)]


def said_of(state: list[Message], action: str, *roles: str) -> dict[str, str]:
    """Role -> what it says of the action, on a desk with the default options."""
    return {
        role: envs.perfect("wide_desk", {}, role, ROLES.prompt(role, state, action=action, thought="", **FIELDS[role]))
        for role in roles
    }


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("size", SIZES.values(), ids=str)
def test_a_perfect_role_says_what_is_true_of_the_action_in_words_that_its_readers_read(
    size: tuple[int, int], rung: str
) -> None:
    """Against `truth`, on random visits of two steps, for the prompts that the stages write."""
    options = {"slots": size[0], "values": size[1], "audit": rung}
    rng, opts = random.Random(rung), Options(**options)
    for _ in range(20):
        right = needed(opts, "refund", "gold")
        chosen = [one if rng.random() < 0.5 else rng.choice(phrases(*size)) for one in right]
        acts = [f"{tool} {spoken(phrase)}" for tool, phrase in zip(STEPS, chosen, strict=False)]
        k = rng.randrange(2)
        known = truth(options, ANA, acts[: k + 1])
        env = WideDesk(opts)
        state = begun(env)
        state += [act(acts[0]), *env.step(act(acts[0])).messages] if k else []

        def said(role: str, **fields: str) -> str:
            prompt = ROLES.prompt(role, state, action=acts[k], thought="", **fields)  # noqa: B023
            return envs.perfect("wide_desk", options, role, prompt)

        verdict = parse_evaluation(said("evaluator", futures="Future: give, then pass."))
        assert verdict.optimal == known.optimal
        assert known.optimal or may(known.cause) in said("evaluator", futures="")
        future = said("successor")
        parse_future(future)
        assert (" then pass." in future) == (known.q == 1)
        assert known.named_in(future) == bool(known.cause)
        rewrite = parse_react(said("refiner", evaluation="Optimality: No."))[1]
        assert rewrite == f"{STEPS[k]} {spoken(right[k])}"


def test_a_perfect_role_does_with_an_unreadable_action_what_the_desk_does() -> None:
    said = said_of(begun(WideDesk(Options())), "give cash", "successor", "evaluator")
    assert said == {"successor": "Future: not understood, then fail.", "evaluator": "Optimality: No."}


@pytest.mark.parametrize("hinted", [0, 1])
def test_a_perfect_role_counts_the_steps_that_are_done_and_not_the_replies(hinted: int) -> None:
    """A reply that the desk could not read, at the first or at the second step, got a hint, and the step stayed."""
    right, state = needed(Options(), "refund", "gold"), begun(WideDesk(Options()))
    done: list[Message] = [act(f"give {spoken(right[0])}"), {"role": "user", "content": "done."}]
    hint: list[Message] = [act("give nothing"), {"role": "user", "content": "not understood. use give now."}]
    state += [*hint, *done] if hinted == 0 else [*done, *hint]
    action = f"lend {spoken(right[1])}"
    said = said_of(state, action, *FIELDS)
    assert said["successor"] == "Future: lend, then pass." and said["evaluator"] == "Optimality: Yes."
    assert parse_react(said["refiner"])[1] == action
    envs.check_readable("wide_desk", {}, state, f"Thought: gold refund. Action: {action}")


def test_an_environment_whose_optimum_is_not_known_says_so() -> None:
    with pytest.raises(UsageError, match=r'roles\.oracle: service_desk has no function `perfect`.*set it to "none"'):
        envs.perfect("service_desk", {}, "evaluator", [])
