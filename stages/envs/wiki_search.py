"""wiki_search: answer a question that needs more than one page of a wiki, by five tools.

    NAVIGATE(title)        opens a page; of a title that there is not, the nearest ones are told
    FIND(text)             the lines of the open page that hold the text
    SAVE_LINE_IDS(1, 3)    keeps lines of the open page as evidence
    BACK()                 the page before
    SUBMIT(answer)         the end

"NAVIGATE title" is read as well. Reward, at the submission: (1 - w) exact match + w F1 of the saved lines, w =
`evidence_weight`, so {0, 1} by default; exact match after SQuAD's normalisation. Turn limit: `replies`, after which the
question is lost; without one an episode without a submission is truncated by the rollout. What a tool cannot do (no such line, no page to go back to) is answered and changes nothing; another
form is malformed.
Source: Self-AC slides (the tools); ReAct, arXiv 2210.03629 (search, look up, finish). The shipped pages are made by
code (stages/envs/wiki_sample.py); `path` names a user's own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from stages.envs.splits import check_split, deal, draw, place
from stages.envs.squad import exact_match, f1
from stages.envs.wiki_corpus import Corpus, Page, Question, evidence_f1, load_corpus, load_questions
from stages.envs.wiki_sample import sample
from stages.frame.contract import Config, DataPath, FromPath
from stages.frame.react import parse_react
from stages.frame.types import Ask, Env, Malformed, Message, Scenario, Step, UsageError

_ACTION = re.compile(r"([A-Z_]+)\b(.*)", re.IGNORECASE)
_LINE_IDS = re.compile(r"\[?\s*([0-9]{1,6}(?:\s*[, ]\s*[0-9]{1,6}){0,49})\s*\]?")
_LONGEST = 300  # characters of an argument

TOOLS = {
    "NAVIGATE": ("title", "Open the page of this title."),
    "FIND": ("text", "Show the lines of the open page that hold this text."),
    "SAVE_LINE_IDS": ("ids", "Keep these lines of the open page as evidence, such as 1, 3."),
    "BACK": ("", "Go back to the page before."),
    "SUBMIT": ("answer", "Give the answer and end."),
}

_SYSTEM = """Answer the question by reading a wiki. Tools:
{tools}
Reply in this form:
Thought: what you know and what is missing
Action: TOOL(argument)"""


class Options(Config):
    """Which pages and questions, and what counts."""

    path: Annotated[str, FromPath(beside="questions.jsonl")] = Field(
        "", description="Folder or file of pages; empty = the sample made by code. [ours]"
    )
    questions: DataPath = Field(
        "", description="File of questions about `path`; empty = questions.jsonl in its folder. [ours]"
    )
    evidence_weight: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the reward that the saved lines give. [ours; slides: evidence, no number]",
    )
    replies: int = Field(
        0,
        ge=0,
        description="Actions after which the question is lost, impossible ones included; 0 = no end but a submission. [ours]",
    )
    page_lines: int = Field(40, ge=1, description="Lines, and links, shown of a page; FIND reaches the others. [ours]")
    suggestions: int = Field(5, ge=0, le=100, description="Titles told where there is no such page. [ours]")
    reveal: bool = Field(False, description="Tell the right answer after a wrong one. [ours]")
    sample_seed: int = Field(0, description="Seed of the sample's pages. [ours]")
    test: float = Field(
        0.25, ge=0, le=1, description="Share of the questions without a split of their own in the test split. [ours]"
    )
    validation: float = Field(
        0.1, ge=0, le=1, description="The same; where a file has train and no validation, this share of train. [ours]"
    )
    split_seed: int = Field(0, description="Another number deals the questions to the splits anew. [ours]")


OPTIONS = Options


class WikiSearch:
    """One question."""

    tools: Sequence[Mapping[str, Any]] = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": text,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": "string"}} if key else {},
                    "required": [key] if key else [],
                },
            },
        }
        for name, (key, text) in TOOLS.items()
    ]

    def __init__(self, options: Options, corpus: Corpus) -> None:
        self.system = _SYSTEM.format(tools="\n".join(f"{name}({key}): {text}" for name, (key, text) in TOOLS.items()))
        self._options, self._corpus = options, corpus
        self._data: Mapping[str, Any] | None = None
        self._pages: list[Page] = []  # opened, the one that is read last
        self._saved: list[tuple[str, int]] = []
        self._replies = 0

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        self._data, self._pages, self._saved, self._replies = scenario.data, [], [], 0
        return ({"role": "user", "content": str(self._data["question"])},)

    def step(self, message: Message) -> Step:
        """Use a tool. Raises Malformed, and RuntimeError after the end."""
        if self._data is None:
            raise RuntimeError("wiki_search: there is no question, or it is answered; call reset first")
        tool, argument = read_action(parse_react(str(message.get("content") or ""))[1])
        self._replies += 1
        if tool == "SUBMIT":
            return self._submit(argument, self._data)
        if self._replies == self._options.replies:
            self._data = None
            return _say("That was the last reply, and nothing is submitted.", terminated=True)
        if tool == "NAVIGATE":
            return _say(self._navigate(argument))
        if not self._pages:
            return _say("No page is open. Use NAVIGATE.")
        return _say({"FIND": self._find, "SAVE_LINE_IDS": self._save, "BACK": self._back}[tool](argument))

    def _navigate(self, title: str) -> str:
        page = self._corpus.page(title)
        if page is None:
            near = self._corpus.nearest(title, self._options.suggestions)
            return f"There is no page {title!r}." + (f" Nearest: {'; '.join(near)}." if near else "")
        if not self._pages or self._pages[-1] is not page:
            self._pages.append(page)
        return self._shown(page)

    def _back(self, _: str) -> str:
        if len(self._pages) < 2:
            return "There is no page before this one."
        self._pages.pop()
        return self._shown(self._pages[-1])

    def _find(self, text: str) -> str:
        page, wanted = self._pages[-1], " ".join(text.casefold().split())
        found = [(i, line) for i, line in enumerate(page.lines, 1) if wanted in line.casefold()]
        return self._listed(found) if found else f"No line of {page.title} holds {text!r}."

    def _save(self, ids: str) -> str:
        page, wanted = self._pages[-1], [int(number) for number in re.findall(r"[0-9]+", ids)]
        if not all(1 <= number <= len(page.lines) for number in wanted):
            return f"Nothing is saved: {page.title} has lines 1 to {len(page.lines)}."
        self._saved = list(dict.fromkeys([*self._saved, *((page.title, number) for number in wanted)]))
        return f"Saved lines in all: {len(self._saved)}."

    def _submit(self, answer: str, data: Mapping[str, Any]) -> Step:
        gold, weight = str(data["answer"]), self._options.evidence_weight
        exact = exact_match(answer, gold)
        evidence = evidence_f1(self._saved, [(title, line) for title, line in data["evidence"]])
        self._data = None
        told = [f"{'Right' if exact else 'Wrong'}."]
        told += [f"It is {gold}."] if self._options.reveal and not exact else []
        told += [f"Evidence: {evidence:.2f} of 1."] if weight else []
        info = {"exact": exact, "f1": f1(answer, gold), "evidence": evidence}
        # In this order a right answer with all its evidence gives exactly 1.
        reward = exact + weight * (evidence - exact)
        return Step(({"role": "user", "content": " ".join(told)},), reward, terminated=True, info=info)

    def _shown(self, page: Page) -> str:
        limit = self._options.page_lines
        text = f"{page.title}\n{self._listed(list(enumerate(page.lines, 1)))}"
        more = f"; {len(page.links) - limit} more" if len(page.links) > limit else ""
        return text + (f"\nLinks: {'; '.join(page.links[:limit])}{more}" if page.links else "")

    def _listed(self, lines: Sequence[tuple[int, str]]) -> str:
        limit = self._options.page_lines
        more = [f"{len(lines) - limit} more lines: use FIND"] if len(lines) > limit else []
        return "\n".join([*(f"{number} {line}" for number, line in lines[:limit]), *more])


def _say(text: str, *, terminated: bool = False) -> Step:
    return Step(({"role": "user", "content": text},), terminated=terminated)


def read_action(action: str) -> tuple[str, str]:
    """(tool, argument) of "TOOL(argument)" or "TOOL argument", quotation marks around the argument taken off. Raises
    Malformed.
    """
    found = _ACTION.fullmatch(action.strip())
    tool = found[1].upper() if found else ""
    if not found or tool not in TOOLS:
        raise Malformed(f"not understood. use {', '.join(TOOLS)}")
    argument, key = _bare(found[2].strip()), TOOLS[tool][0]
    if bool(argument) != bool(key):
        raise Malformed(f"{tool} needs {f'its {key}' if key else 'nothing after it'}: {tool}({key})")
    if len(argument) > _LONGEST:
        raise Malformed(f"{tool}: the {key} has more than {_LONGEST} characters")
    if tool == "SAVE_LINE_IDS" and not _LINE_IDS.fullmatch(argument):
        raise Malformed("SAVE_LINE_IDS needs up to 50 numbers of lines: SAVE_LINE_IDS(1, 3)")
    return tool, argument


def readable(options: Mapping[str, Any], state: Sequence[Message], reply: str) -> None:
    """Raises Malformed as the wiki would: for no tool of its own, or a wrong argument. What a tool cannot do on this
    page can be read.
    """
    read_action(parse_react(reply)[1])


def _bare(text: str) -> str:
    """Without the brackets, then the quotation marks, that stand around all of it; "(A) b (c)" has none."""
    depths = list(itertools.accumulate((char == "(") - (char == ")") for char in text))
    if text.startswith("(") and 0 in depths and depths.index(0) == len(text) - 1:
        text = text[1:-1].strip()
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1].strip() if quoted else text


def _library(options: Options) -> tuple[Corpus, Sequence[Question]]:
    if not options.path:
        if options.questions:
            raise UsageError(
                "task.options.questions of wiki_search needs the pages that it is about. Set task.options.path."
            )
        return sample(options.sample_seed)
    path = Path(options.path)
    folder = path if path.is_dir() else path.parent
    corpus, questions = (
        load_corpus(path),
        load_questions(Path(options.questions) if options.questions else folder / "questions.jsonl", path),
    )
    if options.evidence_weight and (bare := next((q.id for q in questions if not q.evidence), None)):
        raise UsageError(
            f"task.options.evidence_weight of wiki_search needs evidence for every question; {bare!r} has none. Set it to 0."
        )
    return corpus, questions


def make(options: Mapping[str, Any], ask: Ask | None = None) -> Callable[[], Env]:
    """All environments of one maker share the corpus, which nothing changes. Raises UsageError for an unusable file."""
    checked = Options.model_validate(dict(options))
    corpus, _ = _library(checked)
    return lambda: WikiSearch(checked, corpus)


def scenarios(options: Mapping[str, Any], split: str, n: int | None, seed: int) -> list[Scenario]:
    """Questions of a split in an order fixed by the seed, train over and over. Raises UsageError for an unusable file."""
    checked = Options.model_validate(dict(options))
    check_split("wiki_search", split)
    _, questions = _library(checked)
    cut = not any(q.split == "validation" for q in questions)
    return [
        _scenario(split, q) for q in draw([q for q in questions if _split(q, checked, cut) == split], split, n, seed)
    ]


def _split(question: Question, options: Options, cut: bool) -> str:
    if not question.split:
        return deal(question.id, options.split_seed, test=options.test, validation=options.validation)
    if question.split == "train" and cut and place(question.id, options.split_seed) < options.validation:
        return "validation"
    return question.split


def _scenario(split: str, q: Question) -> Scenario:
    return Scenario(
        "wiki_search",
        split,
        q.id,
        {"question": q.question, "answer": q.answer, "evidence": [list(item) for item in q.evidence]},
    )
