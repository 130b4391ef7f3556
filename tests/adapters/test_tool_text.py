"""Tools as text, and mathematics beside the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from stages.adapters.tool_text import observed, spoken, with_tools
from stages.adapters.verifiers_rubric import failures, limit_by_threads
from stages.frame.border import BrokenEnvironment
from stages.frame.types import Malformed

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "times", "description": "A product.", "parameters": {"type": "object"}},
}


def test_tools_are_told_behind_the_system_message() -> None:
    assert with_tools("Be brief.", []) == "Be brief."
    told = with_tools("Be brief.", [TOOL])
    assert told.startswith("Be brief.\n\n# Available tools\ntimes: A product.") and "Action: {" in told
    assert with_tools("", [TOOL["function"]]).startswith("# Available tools")


def test_a_reply_is_a_call_where_its_action_is_one() -> None:
    call = 'Thought: so\nAction: {"name": "times", "arguments": {"a": 6}}'
    message = spoken(call, [TOOL], "call_1")
    function = {"name": "times", "arguments": '{"a": 6}'}
    assert message["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]
    for reply in ("It is 42.", "Action: It is 42.", ""):
        assert spoken(reply, [TOOL], "x") == {"role": "assistant", "content": reply}
    assert "tool_calls" not in spoken(call, [], "x")


@pytest.mark.parametrize(
    "action", ['{"name": "times"', '{"name": "times"}', '{"name": 1, "arguments": {}}', "{" * 9999]
)
def test_a_call_that_cannot_be_read_is_malformed(action: str) -> None:
    with pytest.raises(Malformed, match="wanted"):
        spoken(f"Action: {action}", [TOOL], "x")


def test_a_tool_s_output_is_told_by_a_user() -> None:
    assert observed({"role": "tool", "tool_call_id": "x", "content": "42"}) == {
        "role": "user",
        "content": "Tool output: 42",
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert observed({"role": "user", "content": parts}) == {"role": "user", "content": "a\nb"}
    with pytest.raises(BrokenEnvironment, match="another kind"):
        observed({"role": "user", "content": [{"type": "image_url"}]})


def on_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_math_verify_compares_on_any_thread_within_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    math_verify = pytest.importorskip("math_verify")
    from math_verify import grader, parser

    for module in (parser, grader):
        monkeypatch.setattr(module, "timeout", module.timeout)  # put back afterwards
    limit_by_threads()
    limit_by_threads()

    def right() -> bool:
        return bool(math_verify.verify(math_verify.parse(r"$\frac{1}{2}$"), math_verify.parse("$0.5$")))

    assert right() and on_a_thread(right)

    def slow(*args: Any, **kwargs: Any) -> None:
        threading.Event().wait(5)

    def undecided() -> str:
        monkeypatch.setattr(parser, "extract_target_from_pred", slow)
        try:
            with failures():
                assert math_verify.parse("$0.5$", parsing_timeout=1) == []  # it swallows its limit
        except RuntimeError as error:
            return str(error)
        return "decided"

    assert on_a_thread(undecided) == "math-verify could not decide within 1 s"
