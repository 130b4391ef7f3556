"""`roles.oracle`: one role is played by code, the others by the engine as before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stages.envs import wide_desk
from stages.envs.wide_rules import Options
from stages.frame.contract import Context
from stages.frame.sections import ModelConfig, RolesConfig, TaskConfig
from stages.frame.types import Completion, Message
from stages.judge.asking import ask_role
from stages.llm.roles import load_roles
from stages.llm.tokens import ChatTokenizer

BASE = str(Path(__file__).parents[2] / "data" / "base_wide")
ROLES = load_roles("wide_desk")


class Asked:
    """Counts what it is asked, and says one thing."""

    context = None

    def __init__(self) -> None:
        self.n, self.chats = 0, ChatTokenizer(BASE)
        self.encode_all = self.chats.encode_all
        self.decode = self.chats.tokenizer.decode

    def generate(self, requests: Any) -> list[Completion]:
        self.n += len(requests)
        return [Completion("Optimality: Yes.", (1,), (0.0,), "stop") for _ in requests]


def asking(role: str) -> tuple[Context, Asked, list[Message]]:
    engine = Asked()
    run = SimpleNamespace(
        roles=RolesConfig(prompts="wide_desk", oracle=cast(Any, role)),
        task=TaskConfig(env="wide_desk"),
        model=ModelConfig(path=BASE),
    )
    scenario = wide_desk.scenarios({}, "train", 1, 0)[0]
    env = wide_desk.WideDesk(Options())
    state: list[Message] = [{"role": "system", "content": env.system}, *env.reset(scenario)]
    prompt = ROLES.prompt("evaluator", state, action="give nothing", thought="", futures="")
    return cast(Context, SimpleNamespace(run=run, engine=engine)), engine, prompt


def test_the_replaced_role_is_not_asked_and_answers_in_the_tokens_that_an_engine_would_have_used() -> None:
    context, engine, prompt = asking("evaluator")
    [(ids, reply)] = ask_role(context, "evaluator", [prompt], adapter=None, seed=0)
    assert (engine.n, reply.text, reply.finish_reason) == (0, "Optimality: No.", "stop")
    assert ids == engine.chats.encode(prompt)
    assert engine.decode(reply.token_ids[:-1]) == "Optimality: No."
    assert reply.token_ids[-1] == engine.chats.tokenizer.eos_token_id and len(reply.log_probs) == len(reply.token_ids)


@pytest.mark.parametrize("oracle", ["none", "refiner"])
def test_every_other_role_is_asked_as_before(oracle: str) -> None:
    context, engine, prompt = asking(oracle)
    [(_, reply)] = ask_role(context, "evaluator", [prompt], adapter=None, seed=0)
    assert (engine.n, reply.text) == (1, "Optimality: Yes.")
