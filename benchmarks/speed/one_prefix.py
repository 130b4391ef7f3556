"""What roles that begin alike save on tau-bench: tokens of training steps, and of prompts that an engine has read before.

    python -m benchmarks.speed.one_prefix --path FOLDER                                    # training
    .venv-vllm/bin/python -m benchmarks.speed.one_prefix --path FOLDER --engine            # and vLLM's prefix cache

FOLDER holds retail/ as `turnwise data fetch tau_bench` makes it. Conversations: the user, their orders and the products
in these are looked up, then come the benchmark's own actions, each change asked for and agreed to before, by a customer
of one line, 13 turns at most; database, policy document and tools are the real ones. What roles write is made up, of the
lengths that `turnwise plan` assumes. Byte pairs are learned from these very texts, so a token is about four letters, as
in the large models.

before: a role's words first, then the history without the system message, as text; prompts in the order of the draw.
text: the system message and the history as text, then the role's words. chat: the conversation as the policy saw it,
then the words. turn, episode: how transitions are drawn (`draw`).

First table, tokens that go through the model in a step, mean over the steps of one iteration of the paper's preset
(8 main rows, 2 of the other kind): apart, each row for itself; tree, as the stages train; bound, distinct ones, of which
no pass can have fewer. Second table: of the prompt tokens of one iteration's targets and refine the share that vLLM
still had, by role, as it reports it; a tiny random model, replies of 4 tokens, an adapter each for the policy, the target network and the critic, whose
caches are apart.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.passes import table_head, table_row
from stages import envs
from stages.corpora.tokenizers import byte_tokenizer
from stages.envs.tau_bench import RESPOND, TauBench
from stages.envs.tau_data import load_domain
from stages.frame.types import Message, Request, Scenario
from stages.judge.backup import successor_prompt
from stages.learn.adapter import new_adapter, save_adapter
from stages.learn.tree import n_unique
from stages.llm.hf import load_base, model_hash
from stages.llm.metered import Metered
from stages.llm.roles import Roles, ask, history_text, load_roles
from stages.play.chains import draw
from stages.play.drawing import Draw
from stages.play.transitions import Drawable
from stages.targets import TargetsConfig
from stages.train.passes import mixed_batches
from stages.train.rows import TrainRow

TURNS = 13
STEPS, MAIN, BESIDE, PASS_TOKENS = 256, 8, 2, 32768  # of the paper's presets
RANK = 8
ROOM = 4  # tokens of a reply in the second table


@dataclass(frozen=True)
class Point(Drawable):
    """A turn of a played episode, as far as drawing and prompts need it."""

    episode_id: str
    turn: int
    state: tuple[Message, ...]
    next_state: tuple[Message, ...]
    action: str
    terminal: bool
    malformed: bool = False


@dataclass(frozen=True)
class Before(Roles):
    """As roles were asked before: no two of them begin alike."""

    def prompt(self, role: str, state: Sequence[Message], **fields: str) -> list[Message]:
        return [{"role": "user", "content": f"{self.words(role, **fields)}\n\n{history_text(state)}"}]


def customer(messages: Sequence[Message], **sampling: Any) -> str:
    return "Hello, I need help with an order that I made." if len(messages) == 2 else "Yes, please go on."


def said(action: dict[str, Any]) -> Message:
    thought = "The user has said what they want, and the policy asks for this step before any other can be taken."
    return {"role": "assistant", "content": f"Thought: {thought}\nAction: {json.dumps(action)}"}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def script(tables: Mapping[str, Any], actions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What an agent does that looks things up, and tells of each change before it makes it."""
    user = tables["users"][tables["orders"][actions[0]["kwargs"]["order_id"]]["user_id"]]
    items = [item for order in user["orders"] for item in tables["orders"][order]["items"]]
    looks = [
        call(RESPOND, content="Could you tell me your first name, last name and zip code, or your email?"),
        call("find_user_id_by_email", email=user["email"]),
        *(call("get_order_details", order_id=order) for order in user["orders"]),
        *(call("get_product_details", product_id=one) for one in dict.fromkeys(item["product_id"] for item in items)),
    ]
    changes = []
    for a in actions:
        told = f"To confirm, this is what I am about to do: {json.dumps(a['kwargs'])}. Shall I go on?"
        changes += [call(RESPOND, content=told), call(a["name"], **a["kwargs"])]
    end = call(RESPOND, content="It is done. Is there anything else that I can do?")
    return [*looks[: TURNS - 1 - len(changes)], *changes, end]


def played(env: TauBench, scenario: Scenario, tables: Mapping[str, Any]) -> Iterator[Point]:
    state: list[Message] = [{"role": "system", "content": env.system}, *env.reset(scenario)]
    actions = script(tables, scenario.data["actions"])
    for turn, action in enumerate(actions):
        message = said(action)
        seen = env.step(message).messages
        after = [*state, message, *seen]
        last = turn == len(actions) - 1
        yield Point(scenario.id, turn, tuple(state), tuple(after), json.dumps(action), last)
        state = after


def words(n: int, rng: random.Random) -> str:
    """About n tokens of a future or a judgement."""
    known = ("the user", "may agree", "and", "the order", "be changed", "or the id", "be wrong", "so that", "nothing")
    return " ".join(rng.choice(known) for _ in range(n // 2))


def rows_of(chats: Any, roles: Roles, points: Sequence[Point]) -> tuple[list[TrainRow], list[TrainRow]]:
    """The successor's rows and the policy's."""
    rng, futures, actions = random.Random(0), [], []
    for p in points:
        asked = chats.encode(successor_prompt(roles, p.state, p.action)), chats.encode(roles.policy(p.state))
        wrote = [
            chats.tokenizer(text).input_ids for text in (words(128, rng), str(said(json.loads(p.action))["content"]))
        ]
        futures.append(TrainRow(asked[0], wrote[0], key=p.key))
        actions.append(TrainRow(asked[1], wrote[1], key=p.key))
    return futures, actions


def drawn(points: Sequence[Point], n: int, by: Draw, seed: int) -> list[Point]:
    """As targets draws, all priorities alike."""
    config = TargetsConfig(transitions=n, draw=by)
    return [one.t for one in draw(points, {}, config, np.random.default_rng(seed))]


def trained(chats: Any, layouts: dict[str, Roles], points: Sequence[Point], steps: int) -> None:
    """The first table."""
    table_head("layout", "draw", "apart", "tree", "bound", "apart / tree", "tree / bound")
    for layout, roles in layouts.items():
        futures, actions = ({r.key: r for r in rows} for rows in rows_of(chats, roles, points))
        for by in ("turn",) if layout == "before" else ("turn", "episode"):
            apart, tree, bound = [], [], []
            for main, beside in ((futures, actions), (actions, futures)):
                chosen = drawn(points, steps * MAIN, by, seed=1)
                others = drawn(points, steps * MAIN, by, seed=2)
                kinds = {
                    "main": ([main[p.key] for p in chosen], MAIN),
                    "beside": ([beside[p.key] for p in others], BESIDE),
                }
                for step in mixed_batches(
                    kinds, main="main", epochs=1, rng=random.Random(0), device=torch.device("cpu"), pass_tokens=PASS_TOKENS, draw=by,
                ):  # fmt: skip
                    rows = [r.ids for one in step for r in one.rows]
                    apart.append(sum(map(len, rows)))
                    tree.append(sum(len(one.tree.ids) for one in step))
                    bound.append(n_unique(rows))
            a, t, b = map(statistics.mean, (apart, tree, bound))
            table_row(layout, by, f"{a:.0f}", f"{t:.0f}", f"{b:.0f}", f"{a / t:.2f}", f"{t / b:.2f}")


ADAPTERS = {
    "targets/policy": "policy",
    **dict.fromkeys(("targets/successor", "targets/combine", "targets/corrector"), "target"),
}
"""Who is asked in targets; in refine all are the critic's."""


def asked(roles: Roles, p: Point, rng: random.Random) -> dict[str, list[Message]]:
    """What targets and refine ask about one transition, in their order."""
    at, future = {"action": p.action, "thought": ""}, f"Future: {words(100, rng)}"
    merged = {"observation": str(p.next_state[-1]["content"]), "reward": "none", "future": future}
    return {
        "targets/policy": roles.policy(p.next_state),
        "targets/successor": successor_prompt(roles, p.next_state, p.action),
        "targets/combine": roles.prompt("combine", p.state, **at, **merged),
        "targets/corrector": roles.prompt("corrector", p.state, text=future),
        "refine/policy": roles.policy(p.state),
        "refine/successor": successor_prompt(roles, p.state, p.action),
        "refine/evaluator": roles.prompt("evaluator", p.state, **at, futures=future),
        "refine/refiner": roles.prompt("refiner", p.state, **at, evaluation=words(60, rng)),
        "refine/corrector": roles.prompt("corrector", p.state, text=p.action),
    }


def read(
    engine: Any, roles: Roles, points: Mapping[str, Sequence[Point]], *, in_order: bool
) -> dict[str, tuple[int, int]]:
    """Stage and role -> tokens that were asked and that the engine still had. points: of each stage; in_order: as `ask`
    sends them.
    """
    found = {}
    prompts = {
        stage: [asked(roles, p, random.Random(i)) for i, p in enumerate(drawn)] for stage, drawn in points.items()
    }
    for name in asked(roles, points["targets"][0], random.Random(0)):
        meter, adapter = Metered(engine), ADAPTERS.get(name, "critic")
        chats = [p[name] for p in prompts[name.partition("/")[0]]]
        if in_order:
            ask(meter, chats, role=name, adapter=adapter, temperature=0.0, max_tokens=ROOM, seed=0)
        else:
            meter.generate([Request(engine.encode(chat), ROOM, 0.0, 0, adapter, name) for chat in chats])
        found[name] = meter.read[name], meter.cached[name]
    return found


def cached(path: str, layouts: dict[str, Roles], points: Sequence[Point], n: int) -> None:
    """The second table. The engine starts anew for each row: nothing is left of the row before."""
    from stages.llm.vllm import VllmEngine

    done = False
    for layout, roles in layouts.items():
        for by in ("turn",) if layout == "before" else ("turn", "episode"):
            engine = VllmEngine(path, lora_rank=RANK, gpu_memory=0.3)
            for name in ("policy", "target", "critic"):
                engine.load_adapter(name, Path(path) / name)
            chosen = {stage: drawn(points, n, by, seed) for seed, stage in enumerate(("targets", "refine"))}
            found = read(engine, roles, chosen, in_order=layout != "before")
            if not done:
                table_head("layout", "draw", *found, "all")
                done = True
            total = [sum(pair[i] for pair in found.values()) for i in (0, 1)]
            table_row(layout, by, *(f"{had / n:.2f}" for n, had in found.values()), f"{total[1] / total[0]:.2f}")
            del engine


def write_model(folder: Path, texts: Sequence[str], vocabulary: int) -> str:
    """A random Qwen2 of two narrow layers with a tokenizer of these texts, and three adapters in its folder."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = byte_tokenizer(texts, vocabulary)
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32768, bos_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for seed, name in enumerate(("policy", "target", "critic")):
        adapter = new_adapter(load_base(str(folder), "float32")[0], rank=RANK, alpha=RANK, seed=seed)
        save_adapter(adapter, folder / name, model_hash(str(folder)))
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="folder that holds retail/")
    parser.add_argument("--episodes", type=int, default=400, help="tasks of the training split")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--vocabulary", type=int, default=3000)
    parser.add_argument("--engine", action="store_true", help="ask vLLM, too")
    parser.add_argument("--transitions", type=int, default=64, help="that vLLM is asked about")
    args = parser.parse_args()
    options = {"path": args.path, "domain": "retail"}
    scenarios = envs.scenarios("tau_bench", options, "train", None, 0)
    env = envs.make_env("tau_bench", options, customer)()
    assert isinstance(env, TauBench)
    tables = load_domain(args.path, "retail").base.tables
    scenarios = [s for s in scenarios if s.data["actions"] and "order_id" in s.data["actions"][0]["kwargs"]]
    episodes = [list(played(env, s, tables)) for s in scenarios[: args.episodes]]
    points = [p for episode in episodes for p in episode]
    roles = load_roles("tau_bench")
    layouts: dict[str, Roles] = {
        "before": Before(roles.name, roles.templates), "text": replace(roles, history="text"), "chat": roles,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as home:
        texts = [str(m["content"]) for episode in episodes[:50] for m in episode[-1].next_state]
        path = write_model(Path(home) / "model", [*texts, *(str(t) for t in roles.templates.values())], args.vocabulary)
        from stages.llm.tokens import ChatTokenizer

        chats = ChatTokenizer(path)
        system, whole = (
            len(chats.encode(e)) for e in (points[0].state[:1], episodes[len(episodes) // 2][-1].next_state)
        )
        print(
            f"{len(episodes)} episodes of {len(points) / len(episodes):.1f} turns; system message {system}, a whole episode {whole} tokens\n"
        )
        trained(chats, layouts, points, args.steps)
        if args.engine:
            print()
            cached(path, layouts, points, args.transitions)


if __name__ == "__main__":
    main()
