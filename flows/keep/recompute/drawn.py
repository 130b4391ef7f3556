"""targets, refine, pick and q_critic: an engine drew their replies. All that follows from these is recomputed: drawn
transitions, values of rows, and kept or chosen actions; for q_critic also what it learned. Replies without a row are
not stored, so their counts by reason are not recomputed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from flows.keep.recompute import compare, mute
from flows.keep.recompute.compare import Compared, Stored
from stages.frame.contract import Context
from stages.frame.types import Completion, Message, Row
from stages.judge import refinement
from stages.judge.backup import Backup
from stages.judge.critique import Judgement
from stages.judge.fresh import states_in_order
from stages.judge.refinement import Refinement
from stages.llm.roles import roles_of
from stages.llm.tokens import OUT_OF_CONTEXT
from stages.play.chains import drawn_from, pool_of
from stages.play.transitions import Candidate, Transition, in_full
from stages.train.history import fit_metrics

Drawn = tuple[tuple[Transition, ...], float]
"""A chain with its weight."""
UNREADABLE_WORD = "unreadable critique"  # why refine drops an action of which nothing readable was said


def check_targets(context: Context, stored: Stored) -> Compared:
    from stages import targets

    rows, roles = stored.rows("targets"), roles_of(context.run.roles)
    drawn, pool = _drawn(context, "critic")
    found, done = _matched("targets", rows, drawn)
    kept = [
        Backup(
            chain, weight, row["info"]["next_action"], row["info"]["future"],
            (tuple(row["teacher_ids"]), _messages(row["teacher_prompt"])), _reply(row["raw"]), _reply(row["completion"], row["completion_ids"]),
        )
        for row, (chain, weight) in zip(rows, found, strict=False)
    ]  # fmt: skip
    if stored.has_model:
        done += compare.rows("targets", rows[: len(kept)], [targets.target_row(context, roles, b) for b in kept])
    done += _written(context, stored, rows)
    told = {
        "targets/rows": float(len(rows)),
        "targets/dropped": float(len(drawn) - len(rows)),
        "targets/terminal_frac": sum(b.t.terminal for b in kept) / max(len(kept), 1),
        "targets/tokens": float(sum(len(row["completion_ids"]) for row in rows)),
        "targets/pool": float(pool),
        **targets.leaks(roles, kept),
    }
    return done + compare.metrics(stored.metrics, told)


def check_refine(context: Context, stored: Stored) -> Compared:
    config, judged, rows = context.config, stored.rows("judgements"), stored.rows("targets")
    if context.iteration < config.warmup:
        return compare.metrics(stored.metrics, {"refine/rows": 0.0})
    order, states, done = _states(context, "refine", judged)
    refined = _refinements(judged, states, alone=config.refinements == 1)
    learned = refinement.cap_yes(refined, config.yes_frac_max, random.Random(context.seed))
    done += _learned(rows, [(r.state, r.learned.text if r.learned else "", {"kept": r.kept_action}) for r in learned])
    kept = [replace(r, raw=_reply(row["raw"])) for r, row in zip(learned, rows, strict=False)]
    told = refinement.metrics(refined, kept)
    unknown = ("refine/episodes", "refine/env_steps") if config.gate == "reroll" else ()
    told = {name: value for name, value in told.items() if name not in unknown}
    done += _written(context, stored, rows)
    told["refine/missing"] = float(min(config.states, len(order)) - len({r.state.key for r in kept}))
    return done + compare.metrics(stored.metrics, told)


def check_pick(context: Context, stored: Stored) -> Compared:
    from stages import pick

    config, judged, rows = context.config, stored.rows("judgements"), stored.rows("targets")
    if context.iteration < config.warmup:
        return compare.metrics(stored.metrics, {"pick/rows": 0.0})
    order, states, done = _states(context, "pick", judged)
    choices = []
    for key, group in groupby(judged, lambda row: (row["episode_id"], row["turn"])):
        options = tuple(pick.Option(_reply(row["action"]), row["info"]["times"], _word(row)) for row in group)
        choices.append(pick.Choice(states[key], (), options))
    if config.by == "value":
        done += _values(context, stored, choices)
    chosen = pick.with_best_judged(choices, [o for c in choices for o in c.options]) if config.by == "verdict" else []
    picked = [(c.state, c.learned.reply.text, {"kept": True, "times": c.learned.times}) for c in chosen if c.learned]
    done += _learned(rows, picked) if chosen else Compared()
    done += _written(context, stored, rows)
    told = pick.metrics(config, chosen)
    named = ("pick/actions", "pick/options", "pick/yes_rate", "pick/picked_yes_rate") if chosen else ()
    told = {name: value for name, value in told.items() if name in named}
    told["pick/rows"] = float(len(rows))
    told["pick/missing"] = float(min(config.states, len(order)) - len(rows))
    return done + compare.metrics(stored.metrics, told)


def check_q_critic(context: Context, stored: Stored) -> Compared:
    from stages import q_critic
    from stages.judge.q_values import q_prompts
    from stages.train.network import open_net, save_net

    config, rows, roles = context.config, stored.rows("targets"), roles_of(context.run.roles)
    drawn, pool = _drawn(context, "q_critic")
    found, done = _matched("targets", rows, drawn)
    if not stored.has_model or done.differences:
        return done
    backups = []
    for row, (chain, weight) in zip(rows, found, strict=True):
        pairs = [(chain[0].state, chain[0].action or "unreadable")]
        if not chain[-1].terminal:
            pairs.append((chain[-1].next_state, row["info"]["next_action"]))
        now, *then = q_prompts(context, roles, pairs)
        backups.append(
            q_critic.QBackup(chain, weight, now or (), row["info"]["next_action"], then[0] if then else None)
        )
    net, target = open_net(context, context.latest("distill") or context.latest("q_critic"), head=True)
    backups = q_critic.bootstrapped(net, target, backups)
    again = [q_critic.target_row(context, roles, b, b.target(config.gamma)) for b in backups]
    done += compare.rows("targets", rows, again)
    history, errors, target = q_critic.learn(context, net, target, rows)
    known = [{"episode_id": key[0], "turn": key[1], "loss": e, "step": s} for key, (e, s) in errors.items()]
    done += compare.rows("priorities", stored.rows("priorities"), known)
    told = fit_metrics("q_critic", history) | {
        "q_critic/rows": float(len(rows)),
        "q_critic/dropped": float(len(drawn) - len(rows)),
        "q_critic/bootstrapped": float(sum(b.next_ids is not None for b in backups)),
        "q_critic/target_mean": sum(row["info"]["q"] for row in again) / max(len(again), 1),
        "q_critic/pool": float(pool),
    }
    done += compare.metrics(stored.metrics, told)
    return done + compare.left(stored, save_net(context, net, target))


def _drawn(context: Context, critic: str) -> tuple[list[Drawn], int]:
    """The chains that were drawn, in their order, with their weights; and among how many."""
    pool = pool_of(context)
    return drawn_from(context, pool, critic), len(pool)


def _matched(table: str, rows: Sequence[Row], drawn: Sequence[Drawn]) -> tuple[list[Drawn], Compared]:
    """The chain of each row, which are rows of what was drawn in the same order; up to the first that is not."""
    waiting: Iterator[Drawn] = iter(drawn)
    found: list[Drawn] = []
    for number, row in enumerate(rows):
        key = (row["episode_id"], row["turn"])
        one = next((one for one in waiting if one[0][0].key == key), None)
        if one is None:
            where = f"{table} row {number} ({key[0]} turn {key[1]})"
            return found, compare.compare(where, "a transition that was drawn", "not drawn, or in another order")
        found.append(one)
    return found, Compared(len(rows), what=(f"the draw of {len(drawn)} transitions",))


def _states(
    context: Context, stage: str, judged: Sequence[Row]
) -> tuple[list[Candidate], dict[tuple[str, int], Transition], Compared]:
    """The states in the order of their draw; those that were judged, in full; and whether these were the first ones."""
    critics = context.inputs.get("critic", ()) or context.inputs.get("q_critic", ())
    order = states_in_order(context, stage, context.inputs["collect"], critics)
    keys = list(dict.fromkeys((row["episode_id"], row["turn"]) for row in judged))
    by_key = {one.key: one for one in order}
    for number, row in enumerate(judged):
        if (row["episode_id"], row["turn"]) not in by_key:
            where = f"judgements row {number} ({row['episode_id']} turn {row['turn']})"
            return order, {}, compare.compare(where, "a state that was drawn", "not in the pool")
    read = {t.key: t for t in in_full(context.replay, [by_key[key] for key in keys])}
    first = {one.key for one in order[: min(context.config.states, len(order))]}
    # Of pick, a state without a readable reply leaves no row.
    missing = sorted(first - read.keys()) if stage == "refine" else []
    done = compare.compare("judgements: states that were drawn first and are missing", [], missing[:1])
    return order, read, done + Compared(what=(f"the draw of {len(first)} states",))


def _refinements(judged: Sequence[Row], states: dict[tuple[str, int], Transition], *, alone: bool) -> list[Refinement]:
    """Rows of `judgements` as they were before they were stored. alone: every row is of an action of its own."""
    shared: dict[tuple[Any, ...], Completion] = {}
    found: list[Refinement] = []
    for row in judged:
        key = (row["episode_id"], row["turn"])
        if key not in states:
            return found
        action = _reply(row["action"])
        if not alone:
            action = shared.setdefault((*key, row["action"]), action)
        dropped, refused = row["info"]["dropped"], row["info"]["refused"]
        stays = not dropped and (row["verdict"] == "yes" or bool(refused))
        learned = action if stays else _reply(row["refined"]) if row["refined"] or not dropped else None
        # Of an action that could not be read, or had no room, nobody said anything.
        judged_too = (
            row["verdict"] != "malformed" or dropped == UNREADABLE_WORD or (dropped == OUT_OF_CONTEXT and row["action"])
        )
        word = _word(row) if judged_too else None
        found.append(Refinement(states[key], (), action, word, learned=learned, refused=refused, dropped=dropped))
    return found


def _learned(rows: Sequence[Row], found: Sequence[tuple[Transition, str, dict[str, Any]]]) -> Compared:
    """Rows of `targets` with role "policy": which states, which replies, and what is said of them."""
    columns = ("episode_id", "turn", "completion", "info")
    told = [{"episode_id": t.episode_id, "turn": t.turn, "completion": text, "info": info} for t, text, info in found]
    return compare.rows("targets", [{name: row[name] for name in columns} for row in rows], told)


def _written(context: Context, stored: Stored, rows: Sequence[Row]) -> Compared:
    """The ids of each reply that is to be learned, by its text."""
    said = (
        (f"targets row {number} ({row['episode_id']} turn {row['turn']})", row["completion"], row["completion_ids"])
        for number, row in enumerate(rows)
    )
    return mute.written(context, stored, said)


def _values(context: Context, stored: Stored, choices: Sequence[Any]) -> Compared:
    """Q of every option, as far as its row tells it."""
    from stages.judge.q_values import open_q, q_prompts, q_values

    if not stored.has_model:
        return Compared()
    pairs = [(c.state.state, o.action) for c in choices for o in c.options]
    said = [o.judgement.critique for c in choices for o in c.options]
    prompts = q_prompts(context, roles_of(context.run.roles), pairs)
    critic = open_q(context)
    known = iter(q_values(critic.model, critic.head, [ids for ids in prompts if ids]))
    # To the three digits that are stored; the last one may be rounded the other way.
    gaps = [
        (number, text, q)
        for number, (text, ids) in enumerate(zip(said, prompts, strict=True))
        if ids and abs(float(text.removeprefix("Q = ") or "nan") - (q := next(known))) > 6e-4
    ]
    done = compare.total(compare.compare(f"judgements row {n}, critique", text, f"Q = {q:.3f}") for n, text, q in gaps)
    return done + Compared(len(said), what=(f"Q of {len(said)} actions",))


def _word(row: Row) -> Judgement:
    return Judgement(tuple(row["futures"]), row["critique"], row["verdict"])


def _reply(text: str, ids: Sequence[int] = ()) -> Completion:
    return Completion(text, tuple(ids), (), "")


def _messages(contents: str) -> tuple[Message, ...]:
    return tuple({"role": "user", "content": one} for one in json.loads(contents))
