"""What the replays in `stores/` hold, a file a schema, each written by the code of its time: a row of each table."""

from __future__ import annotations

from typing import Any

RUN = "0123456789abcdef0123456789abcdef"
MESSAGES = [{"role": "user", "content": "héllo \U0001f600"}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "episodes": [
        {
            "episode_id": "e0", "iteration": 0, "task": "toy", "split": "train", "scenario_id": "s1", "scenario": {"seed": 1, "deep": [None]},
            "adapter": None, "outcome": "scored", "total_reward": 1.0, "n_turns": 1, "n_malformed": 0, "attempts": 1, "seconds": 0.5,
            "n_tokens": 3, "error": "", "messages": MESSAGES,
        }
    ],
    "turns": [
        {
            "episode_id": "e0", "turn": 0, "state_len": 2, "prompt_ids": [1, 2], "action_ids": [3, 2**31 - 1], "log_probs": [-0.1, -1e-17],
            "text": "Action: look", "thought": "", "action": "look", "observation": "a door", "reward": 1.0, "terminated": True,
            "truncated": False, "malformed": False, "seconds": 0.25,
        }
    ],
    "targets": [
        {
            "target_id": "e0-0-0", "role": "successor", "episode_id": "e0", "turn": 0, "terminal": True, "student_ids": [1], "completion_ids": [2],
            "teacher_ids": [], "student_prompt": "?", "teacher_prompt": "[]", "raw": "a", "completion": "b", "weight": 1.0, "info": {"reward": 1.0},
        }
    ],
    "judgements": [
        {
            "episode_id": "e0", "turn": 0, "state_len": 2, "action": "look", "futures": ["a door"], "critique": "Optimality: Yes",
            "verdict": "yes", "refined": "look", "info": {"dropped": ""},
        }
    ],
    "priorities": [{"episode_id": "e0", "turn": 0, "loss": 0.25, "step": 3}],
}  # fmt: skip
CERTIFICATE: dict[str, Any] = {
    "episode_id": "e0", "turn": 0, "extended": False, "position": 7, "produced": ["a", "<2>"], "rendered": [], "gap_mean": None, "gap_max": 0.5,
}  # fmt: skip
