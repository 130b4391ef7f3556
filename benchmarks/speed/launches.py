"""What a GPU is asked for in a training step of each method: kernels, copies to it, and waits of the host. No GPU is needed.

    python -m benchmarks.speed.launches                          # the shipped base, and a layer of a 135M-shaped Llama
    python -m benchmarks.speed.launches --methods critic --list  # the operators and the waits, by name

Counted on a pretended GPU (benchmarks/pretend_gpu.py; `Counts` has the rule). An operator counts once, whatever its
kernels are; views and what only changes metadata count nothing. The numbers are the same on any machine.
The step is the stage's own: batch, loss, backward pass, clipping, AdamW, metrics and target network. It is the third
step of a run, so that nothing is counted which happens once.

batch: operators while the step's passes are made and moved. forward, backward: of the losses; together over the passes
they are those of a pass. rest: clipping, AdamW, metrics, target network. copies: to the GPU. waits: see `Counts`.
A layer: of a Llama of SmolLM2-135M's shape, whose launches with 3 layers are set against those with 1. Kernels are those
that model.kernels = auto has on a GPU. Liger's are left out, and run nowhere else.
of peft: the same with model.kernels = torch. bare: without an adapter; the embeddings are trained instead, so that gradients flow through every layer.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.passes import made_up, shake, table_head, table_row
from benchmarks.pretend_gpu import Counts, counting, pretended_gpu
from stages import critic, distill, grpo, self_ac
from stages.frame.sections import Kernels, ModelConfig
from stages.learn.adapter import new_adapter, trainable_state
from stages.learn.episode_row import EpisodeIds
from stages.learn.fit import adamw
from stages.learn.later import Later
from stages.learn.value_head import new_head
from stages.store.workspace import silent
from stages.train import network
from stages.train.actor_critic import SelfAcConfig
from stages.train.episode_steps import Trainable, steps
from stages.train.passes import mixed_nll
from stages.train.rows import TrainRow

STEP = 2  # from 0: the one that is counted
METHODS = ("critic", "distill", "q_critic", "rft", "grpo", "self_ac")
OF_135M = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}


@dataclass
class Step:
    """Counts of one step, by what it was doing; passes: how many went through the model."""

    phases: dict[str, Counts] = field(
        default_factory=lambda: {name: Counts() for name in ("batch", "forward", "backward", "rest")}
    )
    passes: int = 0

    def launches(self, *phases: str) -> int:
        return sum(self.phases[name].launches.total() for name in phases or self.phases)

    def total(self, kind: str) -> int:
        return sum(getattr(counts, kind).total() for counts in self.phases.values())


class Watch:
    """Counts the operators of one step of `fit`, by phase."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.step, self._stack, self._at, self._phase = Step(), ExitStack(), 0, "rest"

    def enter(self, phase: str) -> None:
        self._stack.close()
        self._phase = phase
        if self._at == STEP:
            self._stack.enter_context(counting(self.step.phases[phase]))

    def batches(self, made: Iterator[Any]) -> Iterator[Any]:
        """A batch counts for the step that it is for, whenever it is made."""
        for n in range(STEP + 2):
            self._stack.close()
            with counting(self.step.phases["batch"]) if n == STEP else ExitStack():
                batch = next(made)
            self.enter(self._phase)
            yield batch

    def loss(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def watched(model: Any, part: Any) -> Any:
            self.enter("forward")
            self.step.passes += self._at == STEP
            found = loss(model, part)
            self.enter("rest")
            return found

        return watched

    def after_step(self, after_step: Callable[[Any], None]) -> Callable[[Any], None]:
        def watched(done: Any) -> None:
            after_step(done)
            self._at = len(done)
            self._stack.close()

        return watched

    def backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        def watched(*args: Any, **options: Any) -> None:
            self.enter("backward")
            backward(*args, **options)
            self.enter("rest")

        return watched


def counted(method: str, model: Any, vocabulary: int, kernels: Kernels = "auto") -> Step:
    """The third step of a method, on the pretended GPU."""
    watch = Watch(kernels)
    backward = torch.Tensor.backward
    with mock.patch.object(torch.Tensor, "backward", watch.backward(backward)):
        RUNS[method](model, vocabulary, watch)
    return watch.step


def context_of(config: Any, watch: Watch) -> Any:
    """As much of a stage's context as its training reads."""
    return SimpleNamespace(
        config=config, iteration=0, checkpoints=Path("nowhere"), progress=silent, engine=SimpleNamespace(decode=str),
        run=SimpleNamespace(model=ModelConfig(kernels=watch.kernels)),
    )  # fmt: skip


def episodes_of(vocabulary: int) -> list[EpisodeIds]:
    """24 episodes of 5 turns; no two begin alike."""
    return made_up(24, 5, 6, 14, 4, vocabulary)


def role_rows(vocabulary: int) -> list[TrainRow]:
    """A future for each turn: the episode up to its action, a role's words, and 10 tokens to be learned."""
    rng = random.Random(0)
    return [
        TrainRow((*e.ids[: end + 1], *range(7)), [rng.randrange(vocabulary) for _ in range(10)], key=(i, k))
        for i, e in enumerate(episodes_of(vocabulary))
        for k, end in enumerate(e.action_end)
    ]


def own_rows(vocabulary: int) -> list[TrainRow]:
    """Every action after its state."""
    return [
        TrainRow(e.ids[:start], e.ids[start : end + 1], key=(i, k))
        for i, e in enumerate(episodes_of(vocabulary))
        for k, (start, end) in enumerate(zip(e.action_start, e.action_end, strict=True))
    ]


def run_rows(watch: Watch, net: Any, config: Any, kinds: Any, main: str, loss: Any, after_step: Any) -> None:
    """`trained` over `batches_of`, as critic, distill, q_critic and rft have it."""
    context = context_of(config, watch)
    batches = network.batches_of(context, net, kinds, main=main, rng=random.Random(0))
    network.trained(context, net, watch.batches(batches), watch.loss(loss), watch.after_step(after_step))


def run_critic(model: Any, vocabulary: int, watch: Watch) -> None:
    kinds = {"successor": (role_rows(vocabulary), 24), "policy": (own_rows(vocabulary), 8)}
    losses: dict[Any, Any] = {}
    target = trainable_state(model)

    def loss(model: Any, step: Any) -> Any:
        value, metrics, nll_R = mixed_nll(model, step)
        return value, metrics | Later(
            [nll_R], lambda found: losses.update(zip([row.key for row in step.rows], found, strict=True)) or {}
        )

    def after_step(done: Any) -> None:
        nonlocal target
        target = network.followed(target, model, 0.01)

    run_rows(watch, model, critic.CriticConfig(epochs=2), kinds, "successor", loss, after_step)


def run_distill(model: Any, vocabulary: int, watch: Watch) -> None:
    kinds = {"policy": (own_rows(vocabulary), 24), "successor": (role_rows(vocabulary), 8)}
    config = distill.DistillConfig(epochs=2)
    target = trainable_state(model)

    def after_step(done: Any) -> None:
        nonlocal target
        target = network.followed(target, model, 0.01)

    run_rows(watch, model, config, kinds, "policy", distill.with_kl(config, {}), after_step)


def run_q_critic(model: Any, vocabulary: int, watch: Watch) -> None:
    rows = [TrainRow(row.ids[:-1], row.ids[-1:], 0.0, row.key) for row in role_rows(vocabulary)]
    wanted = {row.key: (0.5, 1.0) for row in rows}
    kinds = {network.VALUE: (rows, 24), "policy": (own_rows(vocabulary), 8)}
    net = nn.ModuleList([model, new_head(model, seed=0)])
    errors: dict[Any, Any] = {}
    target = trainable_state(net)

    def loss(net: Any, step: Any) -> Any:
        value, metrics, error = network.mixed_q_loss(net, step, wanted, weight=1.0)
        keys = [row.key for row, kind in zip(step.rows, step.kinds, strict=True) if kind == network.VALUE]
        return value, metrics | Later([error], lambda found: errors.update(zip(keys, found, strict=True)) or {})

    def after_step(done: Any) -> None:
        nonlocal target
        target = network.followed(target, net, 0.01)

    run_rows(watch, net, critic.CriticConfig(epochs=2), kinds, network.VALUE, loss, after_step)


def run_rft(model: Any, vocabulary: int, watch: Watch) -> None:
    def loss(model: Any, step: Any) -> Any:
        return mixed_nll(model, step)[:2]

    kinds = {"policy": (own_rows(vocabulary), 24)}
    run_rows(watch, model, critic.CriticConfig(epochs=2), kinds, "policy", loss, lambda done: None)


def run_grpo(model: Any, vocabulary: int, watch: Watch) -> None:
    turns = [
        {"episode_id": row.key[0], "turn": row.key[1], "prompt_ids": row.prompt_ids, "action_ids": row.completion_ids,
         "log_probs": [-1.0] * len(row.completion_ids)}
        for row in own_rows(vocabulary)
    ]  # fmt: skip
    config = grpo.GrpoConfig(batch=32)
    advantage = {row["episode_id"]: 1.0 - 2 * (row["episode_id"] % 2) for row in turns}
    batches = grpo.step_batches(turns, advantage, config, random.Random(0), model)
    context = context_of(config, watch)
    loss = watch.loss(partial(grpo.clipped_loss, config=config))
    network.trained(context, model, watch.batches(batches), loss, watch.after_step(lambda done: None))


def run_self_ac(model: Any, vocabulary: int, watch: Watch) -> None:
    config = SelfAcConfig(batch=8, checkpoint_every=0)
    episodes = episodes_of(vocabulary)
    found = Trainable(tuple((e,) for e in episodes), {e.key: sum(e.rewards) for e in episodes}, None, {})
    both = nn.ModuleList([model, new_head(model, seed=0)])
    made = steps(found, (1, 2, 3, 4), config, rng=random.Random(0), device=model.device)
    context = context_of(config, watch)
    fit = self_ac.fit

    def watched(net: Any, batches: Any, loss: Any, optimiser: Any, *, after_step: Any, **options: Any) -> Any:
        after = watch.after_step(lambda done: None)
        options["each"] = lambda lists: None  # no ledger
        return fit(net, watch.batches(batches), watch.loss(loss), optimiser, after_step=after, **options)

    with mock.patch.object(self_ac, "fit", watched):
        self_ac.learn(context, both, adamw(both, lr=1e-4), made, len(episodes))


RUNS = {
    "critic": run_critic, "distill": run_distill, "q_critic": run_q_critic, "rft": run_rft, "grpo": run_grpo,
    "self_ac": run_self_ac,
}  # fmt: skip


def base_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained("data/base")


def llama(layers: int) -> Any:
    """Of SmolLM2-135M's shape, with fewer layers and tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, num_hidden_layers=layers, tie_word_embeddings=True, **OF_135M))


def opened(base: Any, *, bare: bool = False) -> Any:
    """On the GPU, in training mode: with an adapter, or bare, where the embeddings learn."""
    if not bare:
        return shake(new_adapter(base, rank=8, alpha=16.0, seed=0)).to("cuda").train()
    for name, parameter in base.named_parameters():
        parameter.requires_grad_("embed_tokens" in name)
    return base.to("cuda").train()


def row(method: str, name: str, step: Step) -> None:
    parts = [step.launches(phase) for phase in step.phases]
    table_row(method, name, step.passes, *parts, sum(parts), step.total("copies"), step.total("waits"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--list", action="store_true", help="also the operators and waits of the shipped base's step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    table_head("method", "model", "passes", "batch", "forward", "backward", "rest", "launches", "copies", "waits")
    with pretended_gpu():
        for method in args.methods:
            base = counted(method, opened(base_model()), 177)
            row(method, "shipped base, 3 layers", base)
            one, three = (counted(method, opened(llama(n)), 1000) for n in (1, 3))
            row(method, "135M shape, 1 layer", one)
            of_peft = [counted(method, opened(llama(n)), 1000, "torch") for n in (1, 3)]
            bare = [counted(method, opened(llama(n), bare=True), 1000) for n in (1, 3)]
            layers = {"a layer, a pass": (one, three), "the same, of peft": of_peft, "the same, bare": bare}
            for name, (few, many) in layers.items():
                each = [(many.launches(p) - few.launches(p)) / 2 / few.passes for p in few.phases]
                table_row(method, name, 1, *(f"{x:g}" for x in (*each, sum(each))), "", "")
            if args.list:
                show(base)


def show(step: Step) -> None:
    for phase, counts in step.phases.items():
        for kind in ("launches", "copies", "waits"):
            found = ", ".join(f"{name} {n}" for name, n in getattr(counts, kind).most_common())
            print(f"    {phase}, {kind}: {found or 'none'}", flush=True)


if __name__ == "__main__":
    main()
