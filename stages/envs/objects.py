"""The objects that 20 Questions asks for, and the recognition of their names in a question.

Names are compared word by word after folding case, accents and punctuation, with simple plurals, so that "breadbox"
does not name bread, "batman" not a bat and "category" not a cat. Spaces and hyphens within a name do not count ("hair
dryer", "hair-dryer", "hairdryer"), but "a corn" is no acorn, and "car, pet" no carpet. Where one name stands inside
another ("soccer ball", "ball"), only the longer one is named.
"""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from stages.envs.files import bad_file, read_rows, text_of
from stages.envs.splits import place

_WANTED = "Give a CSV file with a column 'object', or JSONL with a text 'object'; 'variants' may be there."

Words = tuple[str, ...]

_IRREGULAR = {
    "man": "men",
    "woman": "women",
    "mouse": "mice",
    "foot": "feet",
    "tooth": "teeth",
    "goose": "geese",
    "child": "children",
}
# "Is it a cat?", "My final guess is the cat", "Guess: cat": what may stand before the name in a question that only
# guesses.
_GUESS = re.compile(
    r"^(?:(?:so|ok|okay|well|then|now|finally|i|my|the|final|last|first|best|think|say|answer|guess|would|will|is|are|it|its|they|this|that|object|thing"
    r"|item|could|can|might|be|by any chance)\s+)*(?:(?:a|an|the|some|your|any)\s+)?(?:(?:kind|type|sort|pair|piece) of\s+)?(?:(?:a|an)\s+)?"
)


# Words that are no part of a name that is written apart: "Is it a corn?" does not name the acorn.
_SMALL_WORDS = """
a an the is are was it its they this that these those and or not no of in on at to for by from with as be if so do does did could
will would has have had i you he she we me my your his her our us one any some many much more than
"""
_SMALL = frozenset(_SMALL_WORDS.split())
_APART = re.compile(r"[^\w\s'\u2019`-]+")


@dataclass(frozen=True)
class Item:
    """One object: its name, the further names that win, and the attributes that hold."""

    name: str
    also: tuple[str, ...] = ()
    attributes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Attribute:
    """A yes/no property: phrases that ask for it, phrases that ask for its opposite, attributes that imply it."""

    yes: tuple[str, ...]
    no: tuple[str, ...] = ()
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """All objects of a game, by name, and what can be asked about them (nothing, for a plain list of names)."""

    items: Mapping[str, Item]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


def words(text: str) -> Words:
    """Lower-case words without accents, apostrophes and punctuation: "It's a T-shirt!" -> its, a, t, shirt."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    return tuple(re.sub(r"[^a-z0-9]+", " ", re.sub("['\u2019`]", "", plain)).split())


@functools.cache
def own_table() -> Table:
    """The table that is part of the package. Attributes are closed under implication: a bird is an animal is alive."""
    content: dict[str, Any] = tomllib.loads(
        files("stages.envs").joinpath("data/twenty_questions.toml").read_text("utf-8")
    )
    attributes = {
        name: Attribute(**{key: tuple(value) for key, value in entry.items()})
        for name, entry in content["attributes"].items()
    }

    def close(held: frozenset[str]) -> frozenset[str]:
        more = held | {name for name, attribute in attributes.items() if held & set(attribute.of)}
        return held if more == held else close(more)

    items = {
        name: Item(name, tuple(entry.get("also", ())), close(frozenset(entry["is"].split())))
        for name, entry in content["objects"].items()
    }
    return Table(items, attributes)


@functools.lru_cache(maxsize=4)
def object_table(path: str) -> Table:
    """Objects of a CSV file like the THINGS list, or of JSONL like LMRL-Gym's: `object`, and where there are any
    `variants`, names that win, too.

    Variants are parted by ';', or a list. It says nothing about attributes, so it needs an LLM oracle. Raises
    UsageError with file and line.
    """
    file, items = Path(path), dict[str, Item]()
    for where, row in read_rows(file, _WANTED):
        name = text_of(row, "object", file, where, _WANTED)
        given = row.get("variants") or ""
        variants = given if isinstance(given, list) else str(given).split(";")
        if name in items or not words(name):
            raise bad_file(
                file, f"{where} has the object {name!r} {'again' if name in items else 'without a letter'}", _WANTED
            )
        items[name] = Item(
            name,
            tuple(
                variant
                for variant in (str(variant).strip() for variant in variants)
                if words(variant) and variant != name
            ),
        )
    if not items:
        raise bad_file(file, "there is no object", _WANTED)
    return Table(items)


def cut_table(table: Table, size: int) -> Table:
    """`size` of the objects, chosen by a hash of their names alone; all, where there are no more."""
    chosen = frozenset(sorted(table.items, key=lambda name: place(f"size/{name}", 0))[:size])
    return Table({name: item for name, item in table.items.items() if name in chosen}, table.attributes)


def forms(name: str) -> set[Words]:
    """The name and its simple plural."""
    singular = words(name)
    return {singular, *((*singular[:-1], plural) for plural in _plurals(singular[-1]))} if singular else set()


def _plurals(word: str) -> list[str]:
    if word in _IRREGULAR:
        return [_IRREGULAR[word]]
    if re.search(r"(s|x|z|ch|sh)$", word):
        return [word + "es"]
    if re.search(r"[^aeiou]y$", word):
        return [word[:-1] + "ies"]
    if word.endswith("fe"):
        return [word[:-2] + "ves", word + "s"]
    if word.endswith("f"):
        return [word[:-1] + "ves", word + "s"]
    return [word + "s", word + "es"] if word.endswith("o") else [word + "s"]


class Names:
    """Which objects a text names."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._objects: dict[Words, set[str]] = {}
        for item in items:
            for form in itertools.chain.from_iterable(forms(name) for name in (item.name, *item.also)):
                self._objects.setdefault(form, set()).add(item.name)
        # One word more than the longest name has: it may be written apart.
        self._longest = max((len(form) for form in self._objects), default=0) + 1
        self._joined: dict[str, set[str]] = {}
        for form, found in self._objects.items():
            self._joined.setdefault("".join(form), set()).update(found)

    def mentioned(self, text: str) -> set[str]:
        """Objects whose name stands anywhere in the text, the longest name first at each place."""
        found: set[str] = set()
        tokens, beside, start = words(text), _beside(text), 0
        while start < len(tokens):
            spans = (tokens[start : start + n] for n in range(min(self._longest, len(tokens) - start), 0, -1))
            named = next(((span, objects) for span in spans if (objects := self._named(span, beside))), None)
            found |= named[1] if named else set()
            start += len(named[0]) if named else 1
        return found

    def guessed(self, text: str) -> set[str]:
        """Objects that the text guesses and nothing else: "Is it a cat?", not "Is it bigger than a cat?" nor a list."""
        plain = " ".join(words(text))
        opening = _GUESS.match(plain)
        return self._named(tuple(plain[opening.end() if opening else 0 :].split()), _beside(text))

    def _named(self, span: Words, beside: set[Words]) -> set[str]:
        """Objects of this name. Written otherwise than in the list, it holds no small word, and nothing but spaces and
        hyphens.
        """
        if span in self._objects or not set(itertools.pairwise(span)) <= beside or set(span) & _SMALL:
            return self._objects.get(span, set())
        return self._joined.get("".join(span), set())


def _beside(text: str) -> set[Words]:
    """Pairs of words that follow each other with nothing but spaces and hyphens between them."""
    return {pair for part in _APART.split(text) for pair in itertools.pairwise(words(part))}
