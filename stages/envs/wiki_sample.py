"""The sample corpus of wiki_search: pages about places, people and works that do not exist, and two-hop questions about
them.

Made by code from templates, so nothing of it is anybody's text. Each page links to the pages it names; each question
needs two pages, and its evidence is the line on each that tells the fact. Ours.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stages.envs.splits import digest
from stages.envs.wiki_corpus import Corpus, Page, Question, sentences

_TOWN_STARTS = (
    "Bram",
    "Cor",
    "Dun",
    "Elm",
    "Far",
    "Gal",
    "Hol",
    "Ister",
    "Kell",
    "Lor",
    "Mar",
    "Nor",
    "Ost",
    "Pel",
    "Quar",
    "Ros",
    "Sel",
    "Tarn",
)
_TOWN_ENDS = ("ford", "mere", "wick", "haven", "stead", "dale", "bury", "ness", "holm", "gate")
_RIVERS = ("Asel", "Brune", "Carrow", "Dovane", "Eskery", "Fenna", "Garl", "Hythe")
_FIRST = (
    "Ada",
    "Bruno",
    "Celia",
    "Dario",
    "Edda",
    "Felix",
    "Greta",
    "Hector",
    "Irene",
    "Jonas",
    "Klara",
    "Linus",
    "Mina",
    "Nestor",
    "Opal",
    "Pavel",
)
_LAST = (
    "Ambrel",
    "Bostane",
    "Corvell",
    "Draymore",
    "Esterling",
    "Fanshawe",
    "Gorringe",
    "Halvik",
    "Isperin",
    "Jellander",
    "Kestrow",
    "Lindqvar",
)
_ADJECTIVES = (
    "Silent",
    "Amber",
    "Crooked",
    "Winter",
    "Paper",
    "Salt",
    "Distant",
    "Copper",
    "Hollow",
    "Thirteenth",
    "Blue",
    "Patient",
)
_NOUNS = (
    "Orchard",
    "Lantern",
    "Harbour",
    "Clock",
    "Staircase",
    "Garden",
    "Letter",
    "Mountain",
    "Ferry",
    "Mirror",
    "Window",
    "Archive",
)
_SPANS = ("Iron", "Stone", "Swing", "Arch", "Chain", "Weir")
_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
_HOBBIES = (
    "kept bees",
    "collected old maps",
    "played the cello",
    "repaired clocks",
    "grew roses",
    "walked long distances",
    "painted shop signs",
)
_TRADES = ("glass", "paper", "bells", "cheese", "rope", "salt", "tiles", "cider", "boots")

SIZES = {"river": 5, "town": 10, "author": 8, "engineer": 8, "book": 12, "bridge": 8}
"""Pages of each kind: 51."""


@dataclass
class _Draft:
    """A page being written: sentences, which of them tells which fact, and the titles that they name."""

    kind: str
    title: str
    facts: dict[str, str] = field(default_factory=dict)  # what -> the answer
    told: dict[str, str] = field(default_factory=dict)  # what -> the sentence
    more: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)

    def tell(self, what: str, answer: str, sentence: str) -> None:
        """sentence: with {} where the answer goes."""
        self.facts[what] = answer
        self.told[what] = sentence.format(answer)


@functools.lru_cache(maxsize=4)
def sample(seed: int) -> tuple[Corpus, tuple[Question, ...]]:
    """The corpus and all questions about it; the same for the same seed."""
    rng = random.Random(f"wiki sample {seed}")
    drafts = _drafts(rng)
    pages = {title: _page(draft, rng) for title, draft in drafts.items()}
    return Corpus(pages.values()), tuple(_questions(drafts, pages))


def _page(draft: _Draft, rng: random.Random) -> Page:
    first, *rest = [*draft.told.values(), *draft.more]
    rng.shuffle(rest)
    return Page(draft.title, sentences(" ".join([first, *rest])), tuple(dict.fromkeys(draft.links)))


def _drafts(rng: random.Random) -> dict[str, _Draft]:
    drafts: dict[str, _Draft] = {}

    def new(kind: str, title: str) -> _Draft:
        return drafts.setdefault(title, _Draft(kind, title))

    rivers = [f"River {name}" for name in rng.sample(_RIVERS, SIZES["river"])]
    towns = [start + rng.choice(_TOWN_ENDS) for start in rng.sample(_TOWN_STARTS, SIZES["town"])]
    names = [f"{first} {rng.choice(_LAST)}" for first in rng.sample(_FIRST, SIZES["author"] + SIZES["engineer"])]
    authors, engineers = names[: SIZES["author"]], names[SIZES["author"] :]
    for river in rivers:
        _river(new("river", river), rng, rng.sample(towns, 2))
    for i, town in enumerate(towns):
        _town(new("town", town), rng, rivers[i % len(rivers)])
    for name in names:
        _person(new("person", name), rng, rng.choice(towns), "novelist" if name in authors else "engineer")
    # A page must not name the birthplace of its author or designer: the answer would stand on the first page.
    home = {name: drafts[name].facts["birthplace"] for name in names}
    books = zip(rng.sample(_ADJECTIVES, SIZES["book"]), rng.sample(_NOUNS, SIZES["book"]), strict=True)
    for i, (adjective, noun) in enumerate(books):
        author = authors[i % len(authors)]
        _book(
            new("book", f"The {adjective} {noun}"),
            rng,
            author,
            rng.choice([town for town in towns if town != home[author]]),
        )
    for i in range(SIZES["bridge"]):
        engineer = engineers[i % len(engineers)]
        town = rng.choice([town for town in towns if town != home[engineer]])
        towns.remove(town)
        _bridge(new("bridge", f"{town} {rng.choice(_SPANS)} Bridge"), rng, engineer, rng.choice(rivers), town)
    return drafts


def _river(page: _Draft, rng: random.Random, towns: Sequence[str]) -> None:
    page.tell("length", f"{rng.randrange(41, 480)} kilometres", f"The {page.title} is {{}} long.")
    page.more += [
        f"Boats travel on it between {towns[0]} and {towns[1]}.",
        f"It freezes in one winter out of {rng.randint(3, 9)}.",
    ]
    page.links += towns


def _town(page: _Draft, rng: random.Random, river: str) -> None:
    page.tell("river", river, f"{page.title} is a town on the {{}}.")
    page.tell("founded", str(rng.randrange(1104, 1790)), "It was founded in {}.")
    page.more += [
        f"The town is known for its {rng.choice(_TRADES)}.",
        f"About {rng.randrange(11, 90) * 100} people live there.",
    ]
    page.links.append(river)


def _person(page: _Draft, rng: random.Random, town: str, work: str) -> None:
    page.more.append(f"{page.title} was {'an' if work == 'engineer' else 'a'} {work}.")
    born = f"{rng.randint(1, 28)} {rng.choice(_MONTHS)} {rng.randrange(1801, 1961)}"
    page.tell("born", born, f"{page.title} was born on {{}}.")
    page.tell("birthplace", town, "The place of birth is {}.")
    page.more += [f"In spare hours {page.title.split()[0]} {rng.choice(_HOBBIES)}."]
    page.links.append(town)


def _book(page: _Draft, rng: random.Random, author: str, scene: str) -> None:
    page.tell("author", author, f"{page.title} is a novel by {{}}.")
    page.more += [f"It has {rng.randrange(120, 700)} pages.", f"The story takes place in {scene}."]
    page.links += [author, scene]


def _bridge(page: _Draft, rng: random.Random, engineer: str, river: str, town: str) -> None:
    page.tell("river", river, f"The {page.title} crosses the {{}} near {town}.")
    page.tell("designer", engineer, "It was designed by {}.")
    page.more.append(f"It is {rng.randrange(40, 900)} metres long.")
    page.links += [river, town, engineer]


# Kind of the page that the question names, the fact on it that names another page, the fact asked of that, and the
# question.
_QUESTIONS = (
    ("book", "author", "born", "When was the author of {} born?"),
    ("book", "author", "birthplace", "In which town was the author of {} born?"),
    ("bridge", "designer", "born", "When was the designer of the {} born?"),
    ("bridge", "designer", "birthplace", "In which town was the designer of the {} born?"),
    ("person", "birthplace", "river", "On which river lies the town where {} was born?"),
    ("person", "birthplace", "founded", "In which year was the town founded where {} was born?"),
    ("bridge", "river", "length", "How long is the river that the {} crosses?"),
)


def _questions(drafts: dict[str, _Draft], pages: dict[str, Page]) -> Iterator[Question]:
    for kind, first, second, form in _QUESTIONS:
        for draft in (draft for draft in drafts.values() if draft.kind == kind):
            then = drafts[draft.facts[first]]
            hops = ((draft.title, draft.told[first]), (then.title, then.told[second]))
            evidence = tuple((title, pages[title].lines.index(told) + 1) for title, told in hops)
            question = form.format(draft.title)
            yield Question(digest(question), "", question, then.facts[second], evidence)
