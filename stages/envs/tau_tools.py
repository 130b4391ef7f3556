"""How a tool of tau_bench is called, and the three tools that both domains have: calculate, think,
transfer_to_human_agents.

A tool is a function of a database and of the arguments that the model wrote. Those are never coerced: what is stored is
what was written, since the hash sees it. A call is atomic: one that fails leaves the database as it was. tau-bench
changes it in place, so there a call that fails half-way (the same certificate twice) leaves a half-made change that no
ground truth has. [ours]
"""

from __future__ import annotations

import ast
import copy
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stages.envs.tau_database import Database
from stages.frame.types import Malformed

Tool = Callable[..., str]
TERMINATE = "transfer_to_human_agents"
"""The one tool that ends an episode, in both domains."""

_CHARACTERS = set("0123456789+-*/(). ")
_LONGEST = 400  # characters of an expression, and so the depth of its tree
_LARGEST_BITS = 10_000  # of a power of integers; the largest float has 1,024
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def call(
    tools: Mapping[str, Tool], database: Database, name: str, arguments: Mapping[str, Any]
) -> tuple[Database, str]:
    """(database after the call, observation). A call that cannot be made is the observation "Error: ...", as in
    tau-bench, and changes nothing.
    """
    if name not in tools:
        return database, f"Unknown action {name}"
    try:
        draft = database.draft()
        if problem := misfit(tools[name], arguments):
            return database, f"Error: {problem}"
        # A copy: what is stored must not change with the message, nor the other way round.
        observation = tools[name](draft, **copy.deepcopy(dict(arguments)))
        return draft.finished(), observation  # a tool that tells an error itself has not written yet
    except RecursionError:
        return database, "Error: the arguments are nested too deeply"
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # What the model wrote is of another type than the tool works on: the model's doing, told to it as tau-bench
        # tells it.
        return database, f"Error: {error}"


def check_call(definitions: Sequence[Mapping[str, Any]], name: str, arguments: Mapping[str, Any]) -> None:
    """Raises Malformed for a tool that is not defined, and for arguments that are missing, not defined or of another
    type than the definition says.
    """
    schemas = {d["function"]["name"]: d["function"].get("parameters", {}) for d in definitions}
    if name not in schemas:
        raise Malformed(f"there is no tool {name!r}; wanted one of {', '.join(sorted(schemas))}")
    schema = schemas[name]
    if unknown := sorted(set(arguments) - set(schema.get("properties", arguments))):
        raise Malformed(f"{name} has no argument {unknown[0]!r}; wanted {', '.join(schema['properties']) or 'none'}")
    from jsonschema import Draft202012Validator

    if error := next(iter(Draft202012Validator(schema).iter_errors(arguments)), None):
        raise Malformed(f"{name}: {error.message}")


def misfit(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """What Python 3.10 to 3.12 say where arguments are unexpected or missing, of tau-bench's own function; "" where they
    fit.

    There a tool is a class named like it, with a static method `invoke`. Written out here, since Python's words change
    with its version. An argument "data", which is what the original calls its database, is told in other words there.
    """
    wanted = list(inspect.signature(tool).parameters.values())[1:]  # the first is the database
    called = f"{tool.__name__.title().replace('_', '')}.invoke()"
    unexpected = [key for key in arguments if key not in {one.name for one in wanted}]
    if unexpected:
        return f"{called} got an unexpected keyword argument {unexpected[0]!r}"
    missing = [repr(one.name) for one in wanted if one.default is one.empty and one.name not in arguments]
    if not missing:
        return ""
    *before, last = missing
    listed = f"{', '.join(before)}{',' if len(before) > 1 else ''} and {last}" if before else last
    return f"{called} missing {len(missing)} required positional argument{'s' if before else ''}: {listed}"


def think(database: Database, /, thought: str) -> str:
    return ""


def transfer_to_human_agents(database: Database, /, summary: str) -> str:
    return "Transfer successful"


def calculate(database: Database, /, expression: str) -> str:
    """The value rounded to cents. Python's own numbers and rounding, since tau-bench hands the expression to Python;
    but nothing is run.
    """
    if not isinstance(expression, str):
        raise TypeError("the expression must be a string")
    if not set(expression) <= _CHARACTERS:
        return "Error: invalid characters in expression"
    if len(expression) > _LONGEST:
        return f"Error: the expression has more than {_LONGEST} characters"
    try:
        return str(round(float(_value(ast.parse(expression.lstrip(" "), "<string>", "eval").body)), 2))
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        return f"Error: {error}"


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](left, right)
    raise TypeError("the expression is no number")


def _power(base: Any, exponent: Any) -> Any:
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and abs(base) > 1
        and base.bit_length() * exponent > _LARGEST_BITS
    ):
        raise OverflowError("int too large to convert to float")  # where Python might work for years before it says so
    return base**exponent


def by_name(*tools: Tool) -> dict[str, Tool]:
    """The tools by the names that the model calls them by."""
    return {tool.__name__: tool for tool in tools}


COMMON = by_name(calculate, think, transfer_to_human_agents)
