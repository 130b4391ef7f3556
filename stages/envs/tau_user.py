"""The simulated customer of tau_bench: an LLM that is handed in, told a task that the agent never sees. Nothing it says
is trained on.

It sees the conversation from its side: the agent is its "user", and speaks first, always with the same words. Tool
calls are hidden from it.
Source: sierra-research/tau-bench 59a200c (MIT, Copyright Sierra), user strategy "llm"; the rule of PATIENT is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from stages.frame.types import Ask, EngineUnavailable, Message, SimulatorError

UserPrompt = Literal["original", "patient"]

OPENING = "Hi! How can I help you today?"
STOP = "###STOP###"

# Word for word, the misspelling included: another prompt is another benchmark.
_RULES = (
    "Just generate one line at a time to simulate the user's message.",
    "Do not give away all the instruction at once. Only provide the information that is necessary for the current step.",
    "Do not hallucinate information that is not provided in the instruction. For example, if the agent asks for the order id but it is not "
    "mentioned in the instruction, do not make up an order id, just say you do not remember or have it.",
    f"If the instruction goal is satisified, generate '{STOP}' as a standalone message without anything else to end the conversation.",
    "Do not repeat the exact instruction in the conversation. Instead, use your own words to convey the same information.",
    "Try to make the conversation as natural as possible, and stick to the personalities in the instruction.",
)
# A user who stops at "yes, go ahead" leaves before the agent has done it, and a right agent loses (tau2-bench, pull
# request 297).
_PATIENCE = f"Agreeing to a step does not finish it. After you have said yes, wait until the agent says that it is done; only then may you generate '{STOP}'."


def conversation(instruction: str, prompt: UserPrompt) -> list[Message]:
    """What the customer has been told before it says its first line."""
    rules = (*_RULES, _PATIENCE) if prompt == "patient" else _RULES
    listed = "\n".join(f"- {rule}" for rule in rules)
    system = f"You are a user interacting with an agent.\n\nInstruction: {instruction}\n\nRules:\n{listed}"
    return [{"role": "system", "content": system}, {"role": "user", "content": OPENING}]


def answer(ask: Ask, messages: Sequence[Message], *, temperature: float, seed: int) -> str:
    """The customer's next line. seed: the episode's. Raises SimulatorError where the LLM is down or says nothing."""
    try:
        # Each line draws from a seed of its own.
        said = ask(messages, temperature=temperature, seed=seed + len(messages))
    except EngineUnavailable as error:
        raise SimulatorError(f"the simulated user of tau_bench did not answer: {error}") from error
    if not said.strip():
        raise SimulatorError("the simulated user of tau_bench said nothing. Try another oracle model.")
    return said
