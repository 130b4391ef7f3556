"""SDPO: the policy that has read what came of an episode teaches the policy that has not.

    L = (1 / Z) sum_t D( pi_theta(. | s, a_<t), stop_grad pi_target(. | s, f, a_<t) ),   Z tokens of the step

over the tokens of the actions that were taken; nothing is generated but the episodes. f is what the environment said,
and the replies of another episode of the group that won. D: `stages/learn/divergences.py`; the target is an EMA of pi.
Source: arXiv 2601.20802, of single replies, and its authors' code where a number is "its code". An episode of several turns is ours: every action is taught by what came of
the episode. So is f as one more message behind the state. The authors' weights for stale samples are left out: a new
run of `collect` comes before each.

    turnwise run desk+sdpo
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from stages.frame.contract import Context, Outputs, Stage
from stages.frame.react import without_thought
from stages.frame.types import Malformed, Message, Row, UsageError
from stages.learn.adapter import base_of, with_state
from stages.learn.divergences import Divergence, chunked_divergence
from stages.learn.later import Later
from stages.learn.moving import moved
from stages.learn.tree_attention import body_pass
from stages.llm.feedback import FEEDBACK, REQUEST, WIN, message
from stages.llm.last_message import check_last_message
from stages.llm.roles import Roles, roles_of
from stages.llm.tokens import nothing_fits
from stages.play.transitions import trainable_episodes
from stages.train.history import fit_metrics
from stages.train.model import PassConfig
from stages.train.network import followed, open_net, save_net, trained
from stages.train.on_policy import by_scenario
from stages.train.passes import Pass, half, make_pass, together, token_counts
from stages.train.rows import TrainRow

TURN = (
    "episode_id", "turn", "state_len", "action", "thought", "observation", "terminated", "prompt_ids", "action_ids",
)  # fmt: skip


class SdpoConfig(PassConfig):
    """What the teacher is told, and how the student follows it."""

    epochs: int = Field(1, ge=1, description="Passes over the iteration's turns. [ours]")
    batch: int = Field(32, ge=1, description="Turns a step. [ours]")
    divergence: Divergence = "reverse"
    """reverse: KL(student || teacher). forward: KL(teacher || student). jensen_shannon: of each to their mixture. [paper: its equation is the reverse one; its code has all three, and reverse for feedback]"""
    mix: float = Field(
        0.5, gt=0, lt=1, description="Weight of the teacher in the mixture of jensen_shannon. [its code: 0.5]"
    )
    top_k: int = Field(0, ge=0)
    """Compare the student's most probable tokens and the rest as one; 0 = the whole vocabulary. [its code: 20 for feedback; 0 ours]"""
    feedback: Literal["end", "turn", "none"] = "end"
    """What the environment said that the teacher reads of a lost episode. end: its last words, where it was not cut short. turn: what followed the action itself. none: nothing. [paper: of a single reply]"""
    wins: Literal["skip", "context"] = "context"
    """Whether the teacher reads the replies of another won episode of the group. skip: never; then a won episode teaches nothing. [paper: context]"""
    teacher: Literal["message", "refiner"] = "message"
    """How the teacher reads it. message: as one behind the policy's own prompt. refiner: as the evaluation in the prompt of that role, for models that know no prompts but their roles'. [paper: message; refiner ours]"""
    feedback_intro: str = FEEDBACK
    """Words before the feedback. [ours, after the paper's]"""
    win_intro: str = WIN
    """Words before the replies of a won episode. [ours, after the paper's]"""
    request: str = Field(REQUEST, description="Words at the end of the message. [ours, after the paper's]")
    ema_rate: float = Field(0.05, ge=0, le=1)
    """EMA rate of the teacher's weights, a step. 1 = the policy itself, and both are read in one pass. 0 = they stand still. [paper: an EMA; its code: 0.05, and 0.01 for feedback]"""


@dataclass(frozen=True)
class Pair:
    """One action that was taken, behind the policy's own prompt and behind the teacher's."""

    student: TrainRow
    teacher: TrainRow

    @property
    def whole(self) -> TrainRow:
        """As many tokens as both add to a tree, which begins as they do: for `together`."""
        ids, told = self.student.prompt_ids, self.teacher.prompt_ids
        same = next((i for i, (a, b) in enumerate(zip(ids, told, strict=False)) if a != b), min(len(ids), len(told)))
        return TrainRow([*told, *ids[same:], *self.student.completion_ids], self.teacher.completion_ids)


@dataclass(frozen=True)
class Part:
    """One pass of a step. teacher: None where the student's pass holds the teacher's rows, too, in the same order."""

    student: Pass
    teacher: Pass | None

    @property
    def n_tokens(self) -> int:
        return self.student.n_tokens + (self.teacher.n_tokens if self.teacher else 0)


def run(context: Context) -> Outputs:
    """Artifacts `adapter` and `target`. Where nothing was told, both go out as they came in.

    Raises UsageError where no teacher's prompt fits into the context, the chat template leaves its message out, or the
    task lacks the prompt."""
    config: SdpoConfig = context.config
    roles = roles_of(context.run.roles)
    if config.teacher != "message" and config.teacher not in roles.templates:
        raise UsageError(f'sdpo.teacher: the prompts {roles.name} lack {config.teacher}.md; add it, or set "message"')
    pairs, counts = taught_turns(context, roles)
    model, target = open_net(context, context.latest("sdpo"))
    bar = context.progress("learn from what was said", config.epochs * -(-len(pairs) // config.batch))

    def loss(model: Any, part: Part) -> tuple[Tensor, Later]:
        return distillation(model, part, target, config)

    def after_step(done: list[dict[str, float]]) -> None:
        nonlocal target
        target = followed(target, model, config.ema_rate)
        bar.advance(1)

    batches = step_parts(pairs, config, random.Random(context.seed), model.device)
    history = trained(context, model, batches, loss, after_step)
    return Outputs(fit_metrics("sdpo", history) | counts, {}, save_net(context, model, target))


def taught_turns(context: Context, roles: Roles) -> tuple[list[Pair], dict[str, float]]:
    """The turns of the newest episodes of which the teacher knows something, and counts."""
    config: SdpoConfig = context.config
    latest = context.inputs["collect"][-1:]
    episodes = trainable_episodes(context.replay, latest, ["episode_id", "scenario_id", "total_reward", "messages"])
    turns = context.replay.read("turns", latest, TURN)
    known = told(episodes, turns, config)
    taught = [turn for turn in turns if key_of(turn) in known]
    if taught:
        check_last_message(context.engine, roles)
    messages = {episode["episode_id"]: episode["messages"] for episode in episodes}
    prompts = context.engine.encode_all(
        [teacher_prompt(roles, t, messages[t["episode_id"]], known[key_of(t)], config) for t in taught]
    )
    room = context.engine.context if taught else None
    pairs = [
        Pair(TrainRow(t["prompt_ids"], t["action_ids"], key=key), TrainRow(prompt, t["action_ids"], key=key))
        for t, prompt in zip(taught, prompts, strict=True)
        if room is None or len(prompt) + len(t["action_ids"]) <= room
        for key in [key_of(t)]
    ]
    if taught and not pairs:
        raise nothing_fits("sdpo", len(taught), room)
    counts = {"taught_frac": len(pairs) / max(len(turns), 1), "out_of_context": float(len(taught) - len(pairs))}
    return pairs, {f"sdpo/{name}": value for name, value in counts.items()}


def told(episodes: Sequence[Row], turns: Sequence[Row], config: SdpoConfig) -> dict[tuple[str, int], str]:
    """What the teacher reads at each turn, by (episode, turn); turns of which it knows nothing are left out.

    Of a lost episode the feedback; of any the replies of the first other won episode of its group."""
    ends = {t["episode_id"]: t["observation"] for t in turns if t["terminated"]}
    right = dict.fromkeys((e["episode_id"] for e in episodes), "")
    for members in by_scenario(episodes).values() if config.wins == "context" else ():
        for e in members:
            others = (other for other in members if other is not e and other["total_reward"] >= 1)
            right[e["episode_id"]] = next(map(replies_of, others), "")
    lost = {e["episode_id"] for e in episodes if e["total_reward"] < 1}
    intros = {name: getattr(config, name) for name in ("feedback_intro", "win_intro", "request")}
    found = {}
    for t in (turn for turn in turns if turn["episode_id"] in right):
        said = {"end": ends.get(t["episode_id"], ""), "turn": t["observation"], "none": ""}[config.feedback]
        win, feedback = right[t["episode_id"]], said if t["episode_id"] in lost else ""
        if win.strip() or feedback.strip():
            found[key_of(t)] = message(win, feedback, **intros)
    return found


def replies_of(episode: Row) -> str:
    """What the agent said in an episode, without the private part of its thoughts."""
    found = []
    for said in episode["messages"]:
        if said["role"] == "assistant":
            try:
                found.append(without_thought(str(said["content"])))
            except Malformed:
                continue  # a thought without an end, and nothing said
    return "\n".join(found)


def teacher_prompt(
    roles: Roles, turn: Row, messages: Sequence[Message], text: str, config: SdpoConfig
) -> list[Message]:
    """The policy's own prompt, and one message of the user behind it: the text, or the refiner's words with it.

    With history "text" the last message is made longer, for chat templates that refuse two of one speaker."""
    state = messages[: turn["state_len"]]
    if config.teacher == "refiner":
        action = turn["action"] or "unreadable"
        return roles.prompt("refiner", state, action=action, thought=turn["thought"], evaluation=text)
    seen = roles.policy(state)
    if roles.history == "text" and seen[-1]["role"] == "user":
        return [*seen[:-1], {**seen[-1], "content": f"{seen[-1]['content']}\n\n{text}"}]
    return [*seen, {"role": "user", "content": text}]


def key_of(turn: Row) -> tuple[str, int]:
    return turn["episode_id"], turn["turn"]


def step_parts(pairs: Sequence[Pair], config: SdpoConfig, rng: random.Random, device: Any) -> Iterator[list[Part]]:
    """Steps as lists of passes, as many as `pass_tokens` asks for. A pass holds whole pairs."""
    for _ in range(config.epochs):
        order = rng.sample(list(pairs), len(pairs))
        for start in range(0, len(order), config.batch):
            chosen = order[start : start + config.batch]
            n = sum(len(pair.student.completion_ids) for pair in chosen)
            groups = together([pair.whole for pair in chosen], config.pass_tokens)
            yield moved([part_of([chosen[i] for i in each], n, one=config.ema_rate == 1) for each in groups], device)


def part_of(pairs: Sequence[Pair], n_tokens: int, *, one: bool) -> Part:
    """n_tokens: Z of the step. one: student and teacher are branches of one tree, with the same weights."""
    totals: Mapping[str, int] = {"student": n_tokens, "teacher": n_tokens}
    student = [("student", pair.student) for pair in pairs]
    teacher = [("teacher", pair.teacher) for pair in pairs]
    if one:
        return Part(make_pass([*student, *teacher], n_tokens, totals), None)
    return Part(make_pass(student, n_tokens, totals), make_pass(teacher, n_tokens, totals))


def distillation(model: Any, part: Part, target: Mapping[str, Tensor], config: SdpoConfig) -> tuple[Tensor, Later]:
    """L of one pass, and its metrics. The losses of a step's passes add up to the step's.

    Metrics: the divergence a token, and `advantage`, the mean log pi_target - log pi of the tokens that were taken."""
    student = part.student
    with half(student.tree.ids.device, config.autocast):
        student_KD, teacher_KD = both_states(model, part, target)
        ids_K = student.tree.ids[student.target_K.index_select(0, student.places["student"])]
        found_K, taken_K = chunked_divergence(
            student_KD, teacher_KD, base_of(model).get_output_embeddings(), ids_K, kind=config.divergence,
            mix=config.mix, top_k=config.top_k,
        )  # fmt: skip
    total, n = found_K.sum(), float(len(ids_K))
    counts = token_counts(student)
    for name, value in (token_counts(part.teacher) if part.teacher else {}).items():
        counts[name] += value

    def read(found: float, taken: float) -> dict[str, float]:
        means = {"divergence": found / n, "advantage": taken / n}
        return means | dict.fromkeys(("count/divergence", "count/advantage"), n) | counts

    return total / student.normaliser, Later([total, taken_K.sum()], read)


def both_states(model: Any, part: Part, target: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The states that predict each token of the actions, of student and teacher, (K, D); no gradient into the latter."""
    if part.teacher is None:
        states_TD = body_pass(model, part.student.tree)
        mine, theirs = (
            states_TD.index_select(0, part.student.source_K.index_select(0, part.student.places[kind]))
            for kind in ("student", "teacher")
        )
        return mine, theirs.detach()
    # The teacher first: once the student's pass is made, its weights must stay as they are until the backward pass.
    with torch.no_grad(), with_state(model, dict(target)):
        theirs = body_pass(model, part.teacher.tree).index_select(0, part.teacher.source_K)
    return body_pass(model, part.student.tree).index_select(0, part.student.source_K), theirs


STAGE = Stage(
    "sdpo", 1, SdpoConfig, inputs=("collect", "sdpo"), roles=("policy",), run=run, trains=True, outputs=("adapter/", "target/"),
    roles_if_there=("refiner",),
)  # fmt: skip
