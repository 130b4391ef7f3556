"""collect and evaluate: an engine and an environment played the episodes. All else is recomputed from their turns:
returns, counts of outcomes, win rates with intervals, tokens and prompts. So are the audit of stored verdicts, and a
self_ac policy's values, by its head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from flows.keep.recompute import compare, mute
from flows.keep.recompute.compare import Compared, Stored
from stages.frame.contract import Context
from stages.frame.types import Completion, Episode, Outcome, Row, Scenario, Turn
from stages.judge.audit import Case, measures, predicted
from stages.judge.critique import Judgement
from stages.llm.roles import roles_of
from stages.play.tally import env_steps, summary
from stages.play.transitions import episode_rows


def episodes_of(heads: Sequence[Row], turns: Sequence[Row]) -> list[Episode]:
    """Rows of `episodes` and `turns` as they were before they were stored."""
    of: dict[str, list[Turn]] = {head["episode_id"]: [] for head in heads}
    for t in turns:
        done = Completion(t["text"], tuple(t["action_ids"]), tuple(t["log_probs"]), "")
        of[t["episode_id"]].append(
            Turn(
                t["turn"], t["state_len"], tuple(t["prompt_ids"]), done, t["thought"], t["action"], t["observation"], t["reward"],
                t["terminated"], t["truncated"], t["malformed"], t["seconds"],
            )
        )  # fmt: skip
    return [
        Episode(
            h["episode_id"], Scenario(h["task"], h["split"], h["scenario_id"], h["scenario"]), h["adapter"], Outcome(h["outcome"]),
            tuple(h["messages"]), tuple(of[h["episode_id"]]), h["seconds"], h["error"], h["attempts"],
        )
        for h in heads
    ]  # fmt: skip


def check_collect(context: Context, stored: Stored) -> Compared:
    played, done = _read(context, stored)
    return done + compare.metrics(stored.metrics, summary(played, "collect") | _asked(played))


def check_evaluate(context: Context, stored: Stored) -> Compared:
    from stages import evaluate
    from stages.judge.values import open_critic

    config = context.config
    context = evaluate.on_test(context) if config.split == "test" and config.test_options else context
    played, done = _read(context, stored)
    trials = config.trials if config.split == "test" else 1
    n = len(played) // (config.best_of * trials)
    rounds = [played[i : i + n] for i in range(0, len(played), max(n, 1))]
    found = evaluate.outcome(context, played if trials > 1 else rounds[0], trials)
    if context.latest("critic") and (judged := stored.rows("judgements")):
        found |= _audited(context, played, judged)
        returns = {e.id: e.total_reward for e in played}
        told = [{**row, "info": {**row["info"], "return": returns[row["episode_id"]]}} for row in judged]
        done += compare.rows("judgements", judged, told)
    roles = roles_of(context.run.roles)
    if stored.has_model and config.value and (critic := open_critic(context, roles)):
        values = evaluate.values(context, roles, rounds, critic)
        found |= values.metrics
        done += compare.left(stored, values.files)
    return done + compare.metrics(stored.metrics, found)


def _read(context: Context, stored: Stored) -> tuple[list[Episode], Compared]:
    """The episodes, and what their own rows say of them held against their turns."""
    heads, turns = stored.rows("episodes"), stored.rows("turns")
    played = episodes_of(heads, turns)
    done = compare.rows("episodes", heads, episode_rows(played, context.iteration)["episodes"])
    if stored.has_model:
        done += _prompts(context, played)
    return played, done + _written(context, stored, played)


def _prompts(context: Context, played: Sequence[Episode]) -> Compared:
    """The ids of every reply's prompt, from the messages before it."""
    roles = roles_of(context.run.roles)
    asked = [(e, t) for e in played for t in _replies(e) if t.prompt_ids]
    ids = context.engine.encode_all([roles.policy(e.messages[: t.state_len]) for e, t in asked])
    done = compare.total(
        compare.compare(f"turns ({e.id} turn {t.index}), prompt_ids", t.prompt_ids, found)
        for (e, t), found in zip(asked, ids, strict=True)
    )
    return done + Compared(what=(f"{len(asked)} prompts",))


def _written(context: Context, stored: Stored, played: Sequence[Episode]) -> Compared:
    """The ids of each reply by its text, if the reply is one turn. Several turns need not split between tokens."""
    parts = Counter((e.id, t.state_len) for e in played for t in e.turns)
    said = (
        (f"turns ({e.id} turn {t.index})", t.completion.text, t.completion.token_ids)
        for e in played
        for t in e.turns
        if parts[e.id, t.state_len] == 1
    )
    return mute.written(context, stored, said)


def _replies(episode: Episode) -> list[Turn]:
    """The first turn of each reply: its prompt is the reply's own."""
    first: dict[int, Turn] = {}
    for turn in episode.turns:
        first.setdefault(turn.state_len, turn)
    return list(first.values())


def _asked(played: Sequence[Episode]) -> dict[str, float]:
    """What the engine was asked and gave; not where an episode was tried again, of which nothing is stored."""
    if any(e.attempts > 1 or not e.outcome.trainable for e in played):
        return {}
    read = sum(len(t.prompt_ids) for e in played for t in _replies(e))
    return {
        "collect/requests": float(env_steps(played)),
        "collect/generated_tokens": float(sum(len(t.completion.token_ids) for e in played for t in e.turns)),
        "collect/read_tokens": float(read),
        "collect/read_tokens/policy": float(read),
    }


def _audited(context: Context, played: Sequence[Episode], judged: Sequence[Row]) -> dict[str, float]:
    """The audit's measures, of the verdicts and futures as they were given."""
    by_id: dict[str, Any] = {e.id: e for e in played}
    cases = []
    for row in judged:
        word = Judgement(tuple(row["futures"]), row["critique"], row["verdict"])
        episode = by_id[row["episode_id"]]
        ends_well = predicted(word, context.config.win_words, context.config.loss_words)
        cases.append(Case(episode, episode.turns[row["turn"]], row["action"], word, ends_well, row["info"]["own"]))
    return measures(context, cases)[0]
