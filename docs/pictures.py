"""Draws docs/pictures/loop.svg and tree.svg, for `make docs`. Both tell one real visit, kept in docs/pictures/visit.json.

python docs/pictures.py RUN EPISODE TURN    take another visit: a stage run of refine, and the state that it judged
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent / "pictures"
VISIT = HERE / "visit.json"
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" role="img" aria-labelledby="title desc" \
font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="14" fill="#1e293b">
  <title id="title">{title}</title>
  <desc id="desc">{desc}</desc>
  <style>
    .card {{ fill: #ffffff; stroke: #cbd5e1 }} .context {{ fill: #e2e8f0; stroke: #94a3b8 }} .action {{ fill: #bbf7d0; stroke: #22a052 }}
    .observation {{ fill: #bfdbfe; stroke: #3b82f6 }} .asked {{ fill: #fed7aa; stroke: #ea700c; stroke-dasharray: 4 2 }}
    .said {{ fill: #e9d5ff; stroke: #9333ea }} .line {{ fill: none; stroke: #475569; stroke-width: 1.5 }}
    .small {{ font-size: 12px }} .tiny {{ font-size: 11px }} .muted {{ fill: #475569 }} .bold {{ font-weight: 700 }} .middle {{ text-anchor: middle }} .end {{ text-anchor: end }}
  </style>
  <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#475569"/></marker></defs>
  <rect class="card" x=".5" y=".5" width="959" height="{below}" rx="10"/>
"""
TOKEN = 11.6  # pixels that a token is wide in the tree
CHARACTER = 6.1  # and a character of its text, at most


def text(x: float, y: float, words: str, kind: str) -> str:
    return f'  <text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def block(x: float, y: float, width: float, height: float, kind: str, words: str) -> str:
    """A box with its text in it, wrapped."""
    lines: list[str] = []
    for word in words.split():
        if lines and len(lines[-1]) + 1 + len(word) <= max((width - 8) / CHARACTER, 1):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    top = y + height / 2 - 7 * (len(lines) - 1) + 4
    box = f'  <rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'
    return "\n".join([box, *(text(x + width / 2, top + 14 * i, line, "tiny middle") for i, line in enumerate(lines))])


def svg(height: int, title: str, desc: str, parts: Iterable[str]) -> str:
    head = HEAD.format(height=height, below=height - 1, title=escape(title), desc=escape(desc))
    return head + "\n".join(parts) + "\n</svg>\n"


def station(x: float, y: float, width: float, kind: str, lines: tuple[str, ...]) -> str:
    """A stage of the loop: its name, and what it does."""
    name, *rest = lines
    parts = [f'  <rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="96" rx="8"/>']
    parts.append(text(x + width / 2, y + 26, name, "bold middle"))
    parts += [text(x + width / 2, y + 48 + 17 * i, line, "small middle") for i, line in enumerate(rest)]
    return "\n".join(parts)


def loop(visit: dict[str, Any]) -> str:
    """One iteration of NLAC as a round trip; what the critic says in it is the visit's."""
    said = {row["role"]: row["said"] for row in visit["rows"]}
    fresh, better = (said[role].partition("Action: ")[2] for role in ("policy", "refiner"))
    arrows = (
        "M180 228H222",
        "M374 214C400 200 400 98 426 98",
        "M374 242C400 256 400 342 426 342",
        "M650 98H686",
        "M810 148C810 220 545 210 545 290",
        "M650 342H686",
        "M810 390V440H654",
        "M430 440H105V280",
    )
    parts = [
        station(30, 180, 150, "action", ("collect", "the policy plays", "episodes")),
        station(226, 180, 148, "context", ("replay", "every turn, with", "its token ids")),
        station(430, 50, 220, "said", ("targets", "merge what really happened", "with a predicted future")),
        station(690, 50, 240, "said", ("critic", "train the successor to", "predict that future")),
        station(430, 294, 220, "asked", ("refine", f"critic: “{said['evaluator'].split('. ')[0]}.”", f"“{fresh}” → “{better}”")),
        station(690, 294, 240, "action", ("distill", "train the policy on", "the rewritten action")),
        '  <rect class="context" x="430" y="414" width="220" height="52" rx="8"/>',
        text(540, 436, "evaluate", "bold middle"),
        text(540, 455, "win rate on held-out scenarios", "small middle"),
        *(f'  <path class="line" d="{arrow}" marker-end="url(#tip)"/>' for arrow in arrows),
        text(680, 34, "learn to predict, in words", "muted middle"),
        text(680, 276, "learn to act", "muted middle"),
        text(800, 240, "its futures say what an action leads to", "small muted middle"),
        text(268, 432, "next iteration: the new policy plays", "small muted middle"),
    ]  # fmt: skip
    desc = "A circle of stages: collect plays episodes into a replay; targets and critic train the successor; refine and distill train the policy; evaluate measures it; the next iteration begins."  # fmt: skip
    return svg(490, "One iteration of NLAC", desc, parts)


def tree(visit: dict[str, Any]) -> str:
    """The visit's conversation as a trunk of tokens, and what was asked and said at one state as branches."""
    from stages.learn.tree import common, n_unique

    line = visit["ids"]
    parts = [text(30, 34, "trunk: the visit as it was played, every token once", "muted")]
    x = 30.0
    for one in visit["line"]:
        width = one["tokens"] * TOKEN
        parts.append(block(x, 50, width, 62, one["kind"], one["text"]))
        x += width
    parts.append(text(x + 12, 85, f"{len(line)} tokens", "small muted"))
    fork, bottom = 30 + visit["state"] * TOKEN, 0.0
    names = {"policy": "fresh action", "successor": "future", "evaluator": "critique", "refiner": "rewritten action"}
    for i, row in enumerate(visit["rows"]):
        y, own = 140 + 84 * i, len(row["ids"]) - common(_array(line), _array(row["ids"]))
        said = min(row["tokens"], own)
        bottom = y + 36
        parts.append(f'  <path class="line" d="M{fork:g} {bottom:g}H{fork + 12:g}"/>')
        parts.append(text(fork - 14, y + 32, names[row["role"]], "bold end"))
        parts.append(text(fork - 14, y + 50, NOTES[row["role"]], "small muted end"))
        at = fork + 12
        if own > said:
            parts.append(block(at, y, (own - said) * TOKEN, 72, "asked", row["asked"]))
            at += (own - said) * TOKEN
        spoken = row["said"] if own > said else f"... {row['own']}"
        parts.append(
            block(at, y, said * TOKEN, 72, "action" if row["role"] in ("policy", "refiner") else "said", spoken)
        )
        parts.append(text(at + said * TOKEN + 12, y + 41, f"{own} of {len(row['ids'])} are new", "small muted"))
    parts.insert(1, f'  <path class="line" d="M{fork:g} 112V{bottom:g}"/>')
    rows = [line, *(row["ids"] for row in visit["rows"])]
    total = f"One by one the {len(rows)} rows have {sum(map(len, rows))} tokens. As a tree they have {n_unique(rows)}."
    parts.append(text(30, 494, total, "bold"))
    parts.append(
        text(
            30,
            516,
            "A branch sees the trunk before it and itself, nothing else: every row is what it would be alone.",
            "small muted",
        )
    )
    desc = "A conversation as a row of tokens; at one state the fresh action, the predicted future, the critique and the rewritten action leave it as branches."  # fmt: skip
    return svg(534, "A visit as a tree of tokens", desc, parts)


NOTES = {
    "policy": "the policy, asked again at this state",
    "successor": "what the action leads to; critic trains it",
    "evaluator": "is the action optimal?",
    "refiner": "distill trains the policy on this reply",
}


def _array(ids: list[int]) -> Any:
    import numpy as np

    return np.asarray(ids)


def take(run: str, episode: str, turn: int) -> dict[str, Any]:
    """The visit as the stores have it: run, a stage run of refine of this project folder, judged this turn of the episode."""
    import duckdb

    from flows.keep.recompute.mute import mute
    from flows.presets import load
    from stages.frame.react import parse_react
    from stages.learn.tree import common
    from stages.llm.roles import roles_of

    rows = duckdb.connect("data/turnwise.duckdb", read_only=True)
    one = "from judgements where starts_with(run_id, ?) and starts_with(episode_id, ?) and turn = ?"
    found = rows.execute(
        f"select episode_id, state_len, action, futures, critique, refined {one}", [run, episode, turn]
    ).fetchone()
    assert found is not None, "no such judgement"
    name, n, reply, futures, critique, refined = found
    messages = json.loads(rows.execute("select messages from episodes where episode_id = ?", [name]).fetchall()[0][0])
    config = load("demo")
    engine, roles, state = mute(config), roles_of(config.roles), messages[:n]
    thought, action = parse_react(reply)
    told = "\n".join(json.loads(futures))
    opens = engine.encode(roles.policy(state))[-1:]  # of the assistant's turn

    def ids(chat: list[Any]) -> list[int]:
        made = list(engine.encode(chat))
        return made[:-1] if made[-1:] == list(opens) and len(opens) else made

    prompts = {
        "policy": (roles.policy(state), reply),
        "successor": (roles.prompt("successor", state, action=action, thought=""), told),
        "evaluator": (roles.prompt("evaluator", state, action=action, thought="", futures=told), critique),
        "refiner": (roles.prompt("refiner", state, action=action, thought=thought, evaluation=critique), refined),
    }
    kinds = ["context", "context", *("action" if m["role"] == "assistant" else "observation" for m in messages[2:])]
    starts = [0, *(len(ids(roles.policy(messages[: i + 1]))) for i in range(len(messages) - 1))]
    pairs = zip(starts, starts[1:], kinds, messages, strict=False)
    line = ids(roles.policy(messages[:-1]))
    return {
        "line": [{"kind": kind, "text": m["content"], "tokens": end - start} for start, end, kind, m in pairs],
        "ids": line,
        "state": len(ids(roles.policy(state))),
        "rows": [
            {
                "role": role,
                "own": engine.decode(made[common(_array(line), _array(made)) :]),
                "asked": "" if role == "policy" else prompt[-1]["content"],
                "said": said,
                "ids": made,
                "tokens": len(made) - len(ids(prompt)),
            }
            for role, (prompt, said) in prompts.items()
            for made in (ids([*prompt, {"role": "assistant", "content": said}]),)
        ],
    }


def pictures() -> dict[str, str]:
    """File -> drawing; `make docs` writes them."""
    visit = json.loads(VISIT.read_text(encoding="utf-8"))
    return {"loop.svg": loop(visit), "tree.svg": tree(visit)}


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent.parent))  # also from a checkout that was never installed
    taken = take(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    VISIT.write_text(json.dumps(taken, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
