"""Pages and questions: lines, search, the sample made by code, files of a user, and when two answers are the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages import envs
from stages.envs.squad import exact_match, f1, normalise
from stages.envs.wiki_corpus import Corpus, Page, evidence_f1, load_corpus, load_questions, sentences
from stages.envs.wiki_sample import SIZES, sample
from stages.frame.types import UsageError


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        (
            "J. K. Rowe met Dr. Who in St. Ives. Then No. 5 came.",
            ["J. K. Rowe met Dr. Who in St. Ives.", "Then No. 5 came."],
        ),
        ('He said "Yes." She left. (So it is.) Yes', ['He said "Yes."', "She left.", "(So it is.)", "Yes"]),
        (
            "It cost 3.5 pounds, i.e. much.\n\nÉmile came. élan",
            ["It cost 3.5 pounds, i.e. much.", "Émile came.", "élan"],
        ),
        ("  \n ", []),
    ],
)
def test_text_is_cut_at_sentences(text: str, lines: list[str]) -> None:
    assert list(sentences(text)) == lines


@given(st.text(alphabet="aB .!?\n\"'(1", max_size=80))
def test_no_word_is_lost_between_the_lines(text: str) -> None:
    assert " ".join(sentences(text)).split() == text.split()


def test_a_long_sentence_is_folded() -> None:
    lines = sentences("word " * 300)
    assert len(lines) == 4 and max(map(len, lines)) <= 400
    assert len(sentences("x" * 1000)) == 3


CORPUS = Corpus(
    [
        Page('"Heroes"', ("A song.",), ()),
        Page("Heroes", ("A series.",), ()),
        Page("Ångström Bay", ("A bay near Heroes.",), ()),
        Page("A (film)", ("x y",), ()),
    ]
)


@pytest.mark.parametrize(
    ("asked", "title"),
    [
        ("Heroes", "Heroes"),
        ('"Heroes"', '"Heroes"'),
        ("heroes", '"Heroes"'),
        (" a  (FILM) ", "A (film)"),
        ("A", None),
        ("", None),
    ],
)
def test_a_title_is_found_exactly_first_and_then_without_case(asked: str, title: str | None) -> None:
    page = CORPUS.page(asked)
    assert (page.title if page else None) == title


def test_the_nearest_pages_are_those_with_the_words_in_their_title() -> None:
    assert CORPUS.nearest("angstrom", 5) == ["Ångström Bay"]
    assert CORPUS.nearest("heroes of the bay", 2) == ["Ångström Bay", '"Heroes"']
    assert CORPUS.nearest("?!", 5) == CORPUS.nearest("zebra", 5) == CORPUS.nearest("bay", 0) == []


@given(st.text(max_size=60))
def test_no_text_is_a_broken_search(text: str) -> None:
    assert len(CORPUS.nearest(f'bay {text} " OR NEAR(a)*', 3)) <= 3


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("The  Beatles!", "beatles"),
        ("17 March 1962", "March 17, 1962"),
        ("march 17 1962.", "17 March, 1962"),
        ("a U.S. ship", "US ship"),
        ("471", "471"),
    ],
)
def test_equal_answers(answer: str, gold: str) -> None:
    assert exact_match(answer, gold) and exact_match(gold, answer)
    assert f1(answer, gold) == 1


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("17 March 1963", "March 17, 1962"),
        ("March 1962", "17 March 1962"),
        ("the", "a"),
        ("", ""),
        ("theatre", "atre"),
        ("1", "11"),
    ],
)
def test_other_answers(answer: str, gold: str) -> None:
    assert not exact_match(answer, gold)


def test_f1_is_over_words() -> None:
    assert f1("the river Asel", "Asel") == pytest.approx(2 / 3)
    assert f1("b b", "b") == pytest.approx(2 / 3)
    assert f1("x", "y") == f1("", "y") == 0
    assert normalise("The March 1, 1900 of the 1 March 1900") == "1 march 1900 of 1 march 1900"


def test_evidence_is_the_harmonic_mean_of_precision_and_recall() -> None:
    wanted = [("A", 1), ("B", None)]
    assert evidence_f1([("A", 1), ("B", 7)], wanted) == 1
    assert evidence_f1([("A", 1)], wanted) == pytest.approx(2 / 3)
    assert evidence_f1([("A", n) for n in range(1, 5)], [("A", 1)]) == pytest.approx(0.4)
    assert evidence_f1([], wanted) == evidence_f1([("A", 2)], wanted) == evidence_f1([("A", 1)], []) == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_sample_is_whole_and_its_evidence_tells_the_answer(seed: int) -> None:
    corpus, questions = sample(seed)
    assert len(corpus.pages) == sum(SIZES.values()) == 51
    assert len(questions) == len({q.id for q in questions}) == 80
    titles = set(corpus.pages)
    for page in corpus.pages.values():
        assert 3 <= len(page.lines) <= 5 and set(page.links) <= titles - {page.title}
        assert set(page.links) == {
            title for title in titles - {page.title} if re.search(rf"\b{re.escape(title)}\b", " ".join(page.lines))
        }
    for q in questions:
        (first, one), (second, two) = q.evidence
        assert one is not None and two is not None and first in q.question and second in corpus.pages[first].links
        assert second in corpus.pages[first].lines[one - 1] and q.answer in corpus.pages[second].lines[two - 1]
        assert q.answer not in " ".join(corpus.pages[first].lines)  # so that both pages are needed


def test_the_sample_depends_on_its_seed_alone() -> None:
    assert sample.__wrapped__(0)[1] == sample(0)[1] != sample(1)[1]
    assert sample.__wrapped__(0)[0].pages == sample(0)[0].pages


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


A = {
    "title": "A",
    "text": "A links to B here. It is old.",
    "links": [{"anchor": "b", "title": "B"}, {"title": "Nowhere"}],
}
B = {"title": "B", "text": "B is 5.", "links": ["A", "B", "A"]}


def test_pages_of_jsonl_and_parquet_are_the_same(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    corpus = load_corpus(write(tmp_path / "pages.jsonl", A, "", B))
    assert corpus.pages == {
        "A": Page("A", ("A links to B here.", "It is old."), ("B",)),
        "B": Page("B", ("B is 5.",), ("A",)),
    }
    parts = tmp_path / "parts"
    parts.mkdir()
    pq.write_table(pa.Table.from_pylist([A]), parts / "pages-0.parquet")
    pq.write_table(pa.Table.from_pylist([B]), parts / "pages-1.parquet")
    assert load_corpus(parts).pages == corpus.pages == load_corpus(tmp_path).pages


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 2 is not JSON"),
        ({"title": "B"}, "line 2 has no text 'text'"),
        ({"title": 5, "text": "x"}, "line 2 has no text 'title'"),
        ({**B, "links": "A"}, "line 2 has 'links'"),
        ({**B, "links": [{"anchor": "b"}]}, "line 2 has 'links'"),
        ({**B, "title": "A"}, "line 2 has the title 'A' again"),
    ],
)
def test_a_bad_page_is_one_sentence_with_file_and_line(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        load_corpus(write(tmp_path / "pages.jsonl", A, row))
    assert "pages.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "q"}, "line 2 has no text 'answer'"),
        ({"question": "q", "answer": "The!"}, "of which nothing is left"),
        ({"question": "q", "answer": "5", "split": "dev"}, "'split' other than train, validation, test"),
        ({"question": "q", "answer": "5", "support": ["C"]}, "line 2 has evidence C that is not in the corpus"),
        ({"question": "q", "answer": "5", "evidence": [{"title": "A", "line": 3}]}, "not in the corpus"),
        ({"question": "p", "answer": "5"}, "again"),
    ],
)
def test_a_bad_question_is_one_sentence_with_file_and_line(tmp_path: Path, row: Any, words: str) -> None:
    pages = write(tmp_path / "pages.jsonl", A, B)
    path = write(tmp_path / "questions.jsonl", {"question": "p", "answer": "5"}, row)
    with pytest.raises(UsageError, match=words) as caught:
        load_questions(path, pages)
    assert "questions.jsonl" in str(caught.value)


def test_a_file_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "pages.parquet").write_text("no")
    (tmp_path / "empty").mkdir()
    for path, words in (
        ("pages.parquet", "not a Parquet file"),
        ("empty", "there is no page"),
        ("none.jsonl", "cannot read"),
    ):
        with pytest.raises(UsageError, match=words):
            envs.make_env("wiki_search", {"path": str(tmp_path / path)})
    write(tmp_path / "pages.jsonl", A, B)
    with pytest.raises(UsageError, match=r"questions\.jsonl"):
        envs.make_env("wiki_search", {"path": str(tmp_path / "pages.jsonl")})
