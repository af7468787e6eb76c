"""Make short general instructions with their responses: lists, cases, sorting, facts, rewriting."""

from collections.abc import Callable
from random import Random

from expertflow.data.sources.generated.facts import FACTS
from expertflow.data.sources.generated.words import ADJECTIVES, CITIES, GIVEN_NAMES, NOUNS
from expertflow.data.sources.generated.writing import Record, build_generator

_WORDS = tuple(word.lower() for word in (*NOUNS, *ADJECTIVES))
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_PLEASE = ("", "Please ", "Can you ", "I want you to ")
_KINDS = {
    "fruit": ("apple", "banana", "cherry", "grape", "lemon", "mango", "peach", "plum"),
    "animal": ("bear", "cat", "dog", "fox", "horse", "owl", "tiger", "wolf"),
    "tool": ("axe", "drill", "hammer", "ladder", "rake", "saw", "spade", "wrench"),
    "color": ("black", "blue", "green", "orange", "purple", "red", "white", "yellow"),
}

Pair = tuple[str, str]


def make_record(rng: Random) -> Record:
    """Ask for one small thing, with or without courtesy."""
    instruction, response = rng.choice(_FAMILIES)(rng)
    please = rng.choice(_PLEASE)
    if please:
        instruction = please + instruction[0].lower() + instruction[1:]
    return {"instruction": instruction, "response": response}


def _some(rng: Random, least: int, most: int) -> list[str]:
    return rng.sample(_WORDS, rng.randint(least, most))


def _reverse(rng: Random) -> Pair:
    words = _some(rng, 2, 4)
    return f"Reverse the order of these words: {' '.join(words)}", " ".join(reversed(words))


def _sort(rng: Random) -> Pair:
    words = _some(rng, 3, 4)
    return f"Sort these words by the alphabet: {', '.join(words)}", ", ".join(sorted(words))


def _upper(rng: Random) -> Pair:
    words = " ".join(_some(rng, 2, 3))
    return f"Write in capital letters: {words}", words.upper()


def _bullets(rng: Random) -> Pair:
    words = _some(rng, 2, 4)
    return (
        f"Turn this into a list with dashes: {', '.join(words)}",
        "\n".join(f"- {word}" for word in words),
    )


def _pick(rng: Random) -> Pair:
    kind = rng.choice(list(_KINDS))
    others = [word for name, words in _KINDS.items() if name != kind for word in words]
    right = rng.choice(_KINDS[kind])
    words = [right, *rng.sample(others, 2)]
    rng.shuffle(words)
    return f"Which of these is a {kind}: {', '.join(words)}?", f"The {kind} is {right}."


def _day(rng: Random) -> Pair:
    at, word = rng.randrange(7), rng.choice(_WORDS)
    step, told = rng.choice(((1, "after"), (-1, "before")))
    return (
        f"Say which day comes {told} {_DAYS[at]} and add the word {word}.",
        f"{_DAYS[(at + step) % 7]}, {word}",
    )


def _greet(rng: Random) -> Pair:
    name, city, word = rng.choice(GIVEN_NAMES), rng.choice(CITIES), rng.choice(_WORDS)
    return (
        f"Write a greeting to {name} from {city} about the {word}.",
        f"Dear {name},\nmany greetings from {city}! I thought of you when I saw the {word}.",
    )


def _count(rng: Random) -> Pair:
    words = _some(rng, 2, 6)
    return f"Count the words: {' '.join(words)}", f"There are {len(words)} words."


def _fact(rng: Random) -> Pair:
    (question, answer), word = rng.choice(FACTS), rng.choice(_WORDS)
    return f"{question} End with the word {word}.", f"{answer} {word}"


_FAMILIES: tuple[Callable[[Random], Pair], ...] = (
    *(_reverse, _sort, _upper, _bullets),
    *(_pick, _day, _greet, _count, _fact),
)


generate = build_generator(make_record, key="instruction")
