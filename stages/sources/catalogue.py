"""Which files make up the published data of a task, and what is known of them.

A checksum stands here only where it was computed from the published bytes, or (of a file in our form) from what was made of them. Where
none is known it is empty; such a file is checked by its rows and by the environment that reads it. Ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from stages.sources import convert, wiki


@dataclass(frozen=True)
class Published:
    """A file of a public repository at a commit. sha256: of its bytes, "" where it is not known."""

    repo: str
    commit: str
    path: str
    licence: str
    sha256: str = ""

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def url(self) -> str:
        return f"https://raw.githubusercontent.com/{self.repo}/{self.commit}/{self.path}"


@dataclass(frozen=True)
class Made:
    """A file that an environment reads, made of a published one. rows: as published. sha256: in this form, "" where it is not known."""

    name: str
    of: Published
    rows: int
    convert: Callable[[bytes], bytes]
    sha256: str = ""


@dataclass(frozen=True)
class TaskData:
    """The data of one task: an environment's name, its files, and the options that read them from a folder."""

    name: str
    what: str
    files: tuple[Made, ...]
    options: Callable[[str], tuple[dict[str, Any], ...]]


_MATH_500 = Published(
    "hkust-nlp/simpleRL-reason",
    "cf1c7858bfc145a27aa733e75d930d34f0d318a6",
    "examples/simplelr_math_eval/data/math500/test.jsonl",
    "MIT (MATH, Hendrycks et al. 2021; openai/prm800k)",
    "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
)
_MATH_TRAIN = Published("agentica-project/deepscaler", "95ef74f", "deepscaler/data/train/math.json", "MIT (MATH, Hendrycks et al. 2021)")
_THINGS = Published(
    "evanthebouncy/20Q-selfplay",
    "a8601d80149ef06555c241d1489a762beb5d716c",
    "things.csv",
    "CC0 (THINGS concepts, Hebart et al. 2019); the repository itself names none",
)
_LMRL_GYM = Published("abdulhaim/LMRL-Gym", "911d726", "llm_rl_scripts/twenty_questions/env/data.py", "MIT")
_GAME24 = Published("princeton-nlp/tree-of-thought-llm", "ab400345c5ea39d28ea6d7d3be0e417b11113c87", "src/tot/data/24/24.csv", "MIT")
_WIKI = Published(
    "OSU-NLP-Group/HippoRAG",
    "c617143f01477243992a63b2e2151cc003dd3b21",
    "reproduce/dataset/2wikimultihopqa_corpus.json",
    "CC BY-SA (text of Wikipedia); dataset Apache-2.0 (Ho et al. 2020), repository MIT",
    "9d6e352952aafb18dab22bf8195039461321a44a949df902ae83bce134ad238a",
)

TASKS = {
    task.name: task
    for task in (
        TaskData(
            "math",
            "MATH-500 and the problems of MATH's training part that have an answer",
            (
                Made("test.jsonl", _MATH_500, 500, convert.unchanged, _MATH_500.sha256),
                Made("train.jsonl", _MATH_TRAIN, 7474, convert.math_train, "f39d7c87bcaba74fa93013245e23786f6d668b42c6e7d73dfef21dd7d587f3e8"),
            ),
            lambda folder: ({"path": folder, "unanswered": "skip"},),
        ),
        TaskData(
            "twenty_questions",
            "objects of 20 Questions: the THINGS list, and LMRL-Gym's with variants",
            (
                Made("things_objects.csv", _THINGS, 1823, convert.things),
                Made("lmrl_gym_objects.jsonl", _LMRL_GYM, 158, convert.lmrl_gym, "66a2c4e13ee8981d93752561a1ee4b06f7aeb89c8898c7ff9d31a959e4b21216"),
            ),
            lambda folder: ({"objects": f"{folder}/things_objects.csv"}, {"objects": f"{folder}/lmrl_gym_objects.jsonl"}),
        ),
        TaskData(
            "game24",
            "the puzzles of Tree of Thoughts, from easy to hard",
            (Made("24.csv", _GAME24, 1362, convert.unchanged),),
            lambda folder: ({"path": f"{folder}/24.csv"},),
        ),
        TaskData(
            "wiki_search",
            "passages of 2WikiMultihopQA as pages with links, and two-hop questions made from them",
            (
                Made("pages.jsonl", _WIKI, 6119, wiki.pages, "4a80f997113ef37adbe52e3054c05aa673fb9909f6404cb8987d271821931d49"),
                Made("questions.jsonl", _WIKI, 438, wiki.questions),
            ),
            lambda folder: ({"path": folder},),
        ),
    )
}
