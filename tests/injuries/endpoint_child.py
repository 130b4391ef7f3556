"""An engine in a process of its own: speaks as `vllm serve` does, plays the scripted roles, and answers badly where told.

    python endpoint_child.py MODEL PORT FAULT EVERY

Every EVERY-th completion is answered with FAULT (0: none is), once: tried again, the same request is answered well where
the fault is one that passes. Adapters are known from their loading on, so one that is started anew knows none.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

from openai_stub import Answer, Stub
from tokenizers import Tokenizer  # transformers would take seconds at every start

from stages.frame.types import Request
from stages.llm.scripted import play

SERVED = "data/base"
HANG_S = 8.0  # longer than the commands wait (`model.timeout_s`)
PASSING = ("hang", "429", "500")
LASTING = ("cut JSON", "wrong counts", "NaN", "above 0", "other ids", "no choices")


class Engine(Stub):
    def __init__(self, model: str, port: int, fault: str, every: int) -> None:
        super().__init__(port)
        self.tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
        self.fault, self.every = fault, every
        self.adapters: set[str] = set()
        self.count = 0
        self.answer = self.reply

    def reply(self, path: str, body: dict[str, Any]) -> Answer:
        if path.endswith("/load_lora_adapter"):
            self.adapters.add(body["lora_name"])
            return 200, {"said": "loaded"}
        if body["model"] not in {*self.adapters, SERVED}:
            return 404, {"message": f"The model {body['model']} does not exist."}
        with self.lock:
            self.count += 1
            struck = self.every and self.count % self.every == 0
        whole = self.completion(body)
        return self.badly(whole) if struck else (200, whole)

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the scripted engine says, in this tokenizer's ids."""
        shown = self.tokenizer.decode(body["prompt"], skip_special_tokens=False).replace("<|end|>", "")
        prompt = re.sub(r"<\|(system|user|assistant)\|>", r"\n<\1>\n", shown)
        request = Request(tuple(body["prompt"]), body["max_tokens"], body["seed"], body["temperature"])
        said = self.tokenizer.encode(play(prompt, request), add_special_tokens=False).ids
        end = self.tokenizer.encode("<|end|>", add_special_tokens=False).ids
        ids = [*said, *end][: body["max_tokens"]]
        return {
            "model": body["model"],
            "choices": [
                {
                    "text": "",
                    "finish_reason": "stop" if len(ids) > len(said) else "length",
                    "token_ids": ids,
                    "prompt_token_ids": body["prompt"],
                    "logprobs": {"token_logprobs": [-1.0 - i % 7 / 8 for i in ids]},
                }
            ],
        }

    def badly(self, whole: dict[str, Any]) -> Answer:
        choice = whole["choices"][0]
        scores = choice["logprobs"]["token_logprobs"]
        if self.fault == "hang":
            time.sleep(HANG_S)
        elif self.fault in ("429", "500"):
            return int(self.fault), {"error": {"message": "not now"}}
        elif self.fault == "cut JSON":
            return 200, json.dumps(whole)[: len(json.dumps(whole)) // 2]
        elif self.fault == "wrong counts":
            scores.append(-1.0)
        elif self.fault == "NaN":
            scores[0] = float("nan")
        elif self.fault == "above 0":
            scores[0] = 0.5
        elif self.fault == "other ids":
            choice["token_ids"][0] = 2**32
        elif self.fault == "no choices":
            whole = {"choices": []}
        return 200, whole


def main() -> None:
    model, port, fault, every = sys.argv[1:]
    engine = Engine(model, int(port), fault, int(every))
    print(engine.server.server_port, flush=True)
    sys.stdin.read()  # until whoever started it is gone


if __name__ == "__main__":
    main()
