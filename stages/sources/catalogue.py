"""The files of a task's published data, and what is known of them.

A checksum here was computed from the published bytes or, for a file in our form, from the converted ones. An unknown
checksum is empty. Such a file is checked by its rows and by the environment that reads it. Ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from stages.envs import tau_airline, tau_retail
from stages.envs.splits import SPLITS
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
    """A file that an environment reads, made of published ones, whose bytes `convert` takes in this order.

    rows: as published; lines of JSONL and text, rows of CSV, entries of JSON. sha256: in this form, "" = not known.
    """

    name: str
    of: tuple[Published, ...]
    rows: int
    convert: Callable[..., bytes]
    sha256: str = ""


class Reading(NamedTuple):
    """How an environment reads a folder's files, and the splits that it then has."""

    options: dict[str, Any]
    splits: tuple[str, ...] = SPLITS


@dataclass(frozen=True)
class TaskData:
    """The data of one task: an environment's name, its files, and how it reads them from a folder."""

    name: str
    what: str
    files: tuple[Made, ...]
    readings: Callable[[str], tuple[Reading, ...]]


_MATH_500 = Published(
    "hkust-nlp/simpleRL-reason",
    "cf1c7858bfc145a27aa733e75d930d34f0d318a6",
    "examples/simplelr_math_eval/data/math500/test.jsonl",
    "MIT (MATH, Hendrycks et al. 2021; openai/prm800k)",
    "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
)
_MATH_TRAIN = Published(
    "agentica-project/deepscaler", "95ef74f", "deepscaler/data/train/math.json", "MIT (MATH, Hendrycks et al. 2021)"
)
_THINGS = Published(
    "evanthebouncy/20Q-selfplay",
    "a8601d80149ef06555c241d1489a762beb5d716c",
    "things.csv",
    "CC0 (THINGS concepts, Hebart et al. 2019); the repository itself names none",
)
_LMRL_GYM = Published("abdulhaim/LMRL-Gym", "911d726", "llm_rl_scripts/twenty_questions/env/data.py", "MIT")
_GAME24 = Published(
    "princeton-nlp/tree-of-thought-llm", "ab400345c5ea39d28ea6d7d3be0e417b11113c87", "src/tot/data/24/24.csv", "MIT"
)
_WIKI = Published(
    "OSU-NLP-Group/HippoRAG",
    "c617143f01477243992a63b2e2151cc003dd3b21",
    "reproduce/dataset/2wikimultihopqa_corpus.json",
    "CC BY-SA (text of Wikipedia); dataset Apache-2.0 (Ho et al. 2020), repository MIT",
    "9d6e352952aafb18dab22bf8195039461321a44a949df902ae83bce134ad238a",
)


def _tau(domain: str, tools: Iterable[str], rows: Mapping[str, tuple[int, str]]) -> Iterator[Made]:
    """A domain of tau-bench. rows: of each file, with its checksum. Tools stand in the order of their names."""

    def published(path: str) -> Published:
        commit = "59a200c6d575d595120f1cb70fea53cef0632f6b"
        return Published(
            "sierra-research/tau-bench", commit, f"tau_bench/envs/{domain}/{path}", "MIT (Copyright Sierra)"
        )

    convert_by: Callable[..., bytes]
    for name, (count, sha256) in rows.items():
        stem, _, kind = name.rpartition(".")
        if name == "tools.json":
            of, convert_by = tuple(published(f"tools/{tool}.py") for tool in sorted(tools)), convert.tau_tools
        elif kind == "jsonl":
            of = (published(f"{stem}.py"),)
            convert_by = partial(convert.tau_tasks, name=f"{domain}-{stem.removeprefix('tasks_')}")
        else:
            of, convert_by = (published("wiki.md" if kind == "md" else f"data/{name}"),), convert.unchanged
        yield Made(f"{domain}/{name}", of, count, convert_by, sha256)


_RETAIL = {
    "orders.json": (1000, "2598a12586d28f2d6bd16bc86f4c800029b6af18e0abb5c475ef5c869c11ced1"),
    "products.json": (50, "a9eabcc1a9742c5f5288c2779acce52b9308423383ed24706bbaf0889f762a0f"),
    "users.json": (500, "6f4fd104cc5e80b92166c4035315c31532c6cea52a90dcdf18425ee7f87c2b82"),
    "policy.md": (41, "d539fd2a46a8b8dd2e934ff9ed92f43e9f6b56bc7a718db8d2803ba8ad8f6bf7"),
    "tools.json": (16, "da43b49f4783a9aa82f97f125b2f4c9b56d053cc27e09903ad0ae075026d72ac"),
    "tasks_train.jsonl": (500, "9a6e35d99129a50ff16c4e0df5d9c8ecb0f747d6cf22e2ebd4fd95fe1f2b8c84"),
    "tasks_dev.jsonl": (20, "ca6bacdb7ded1ea72f32d90bae60ff35659eaac24a9a72c940a1f2f50220aa8e"),
    "tasks_test.jsonl": (115, ""),
}
_AIRLINE = {
    "flights.json": (300, "444d7565c68434a3e3fb72efd717f9f9cd5c56dce227f6f56e078f1cb0ed233a"),
    "reservations.json": (2000, "1cf0bbc58ad984be9de7c24dba6dd27393f94cdbd482d8524f6a54db1f561a8c"),
    "users.json": (500, "bd264e2a31e0fa35cdfef8987e70a0dd3776828b582fe90e7a44823a12eb4cea"),
    "policy.md": (37, "56c335801c16e26b54f600f9db99eb04d31db477e86eb160341d5c66b796c5c8"),
    "tools.json": (14, "d8cfd82569349eb7518f92db41545c58b9a20864b9582c450bedec0257382b7b"),
    "tasks_test.jsonl": (50, ""),
}

TASKS = {
    task.name: task
    for task in (
        TaskData(
            "math",
            "MATH-500 and the problems of MATH's training part that have an answer",
            (
                Made("test.jsonl", (_MATH_500,), 500, convert.unchanged, _MATH_500.sha256),
                Made(
                    "train.jsonl",
                    (_MATH_TRAIN,),
                    7474,
                    convert.math_train,
                    "f39d7c87bcaba74fa93013245e23786f6d668b42c6e7d73dfef21dd7d587f3e8",
                ),
            ),
            lambda folder: (Reading({"path": folder, "unanswered": "skip"}),),
        ),
        TaskData(
            "twenty_questions",
            "objects of 20 Questions: the THINGS list, and LMRL-Gym's with variants",
            (
                Made("things_objects.csv", (_THINGS,), 1823, convert.things),
                Made(
                    "lmrl_gym_objects.jsonl",
                    (_LMRL_GYM,),
                    158,
                    convert.lmrl_gym,
                    "66a2c4e13ee8981d93752561a1ee4b06f7aeb89c8898c7ff9d31a959e4b21216",
                ),
            ),
            lambda folder: (
                Reading({"objects": f"{folder}/things_objects.csv"}),
                Reading({"objects": f"{folder}/lmrl_gym_objects.jsonl"}),
            ),
        ),
        TaskData(
            "game24",
            "the puzzles of Tree of Thoughts, from easy to hard",
            (Made("24.csv", (_GAME24,), 1362, convert.unchanged),),
            lambda folder: (Reading({"path": f"{folder}/24.csv"}),),
        ),
        TaskData(
            "wiki_search",
            "passages of 2WikiMultihopQA as pages with links, and two-hop questions made from them",
            (
                Made(
                    "pages.jsonl",
                    (_WIKI,),
                    6119,
                    wiki.pages,
                    "4a80f997113ef37adbe52e3054c05aa673fb9909f6404cb8987d271821931d49",
                ),
                Made("questions.jsonl", (_WIKI,), 438, wiki.questions),
            ),
            lambda folder: (Reading({"path": folder}),),
        ),
        TaskData(
            "tau_bench",
            "databases, policies, tools and tasks of a shop and an airline",
            (*_tau("retail", tau_retail.TOOLS, _RETAIL), *_tau("airline", tau_airline.TOOLS, _AIRLINE)),
            lambda folder: (
                Reading({"path": folder, "domain": "retail"}),
                Reading({"path": folder, "domain": "airline"}, ("test",)),
            ),
        ),
    )
}
