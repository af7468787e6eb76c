"""Generate short general instructions: lists, cases, sorting, facts, rewriting."""

from collections.abc import Callable
from functools import partial
from random import Random

from expertflow.data.records import Fields
from expertflow.data.sources.generated import generator
from expertflow.data.sources.generated.facts import FACTS

_WORDS = tuple(word.lower() for word in (*generator.NOUNS, *generator.ADJECTIVES))
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_PLEASE = ("", "Please ", "Can you ", "I want you to ")
_KINDS = {
    "fruit": ("apple", "banana", "cherry", "grape", "lemon", "mango", "peach", "plum"),
    "animal": ("bear", "cat", "dog", "fox", "horse", "owl", "tiger", "wolf"),
    "tool": ("axe", "drill", "hammer", "ladder", "rake", "saw", "spade", "wrench"),
    "color": ("black", "blue", "green", "orange", "purple", "red", "white", "yellow"),
}

Pair = tuple[str, str]


def make_record(rng: Random) -> Fields:
    instruction, response = rng.choice(_FAMILIES)(rng)
    please = rng.choice(_PLEASE)
    if please:
        instruction = please + instruction[0].lower() + instruction[1:]
    return {"instruction": instruction, "response": response}


def _of_words(
    asked: str, between: str, least: int, most: int, answer: Callable[[list[str]], str]
) -> Callable[[Random], Pair]:
    def ask(rng: Random) -> Pair:
        words = rng.sample(_WORDS, rng.randint(least, most))
        return f"{asked}: {between.join(words)}", answer(words)

    return ask


def _pick(rng: Random) -> Pair:
    kind = rng.choice(list(_KINDS))
    others = [word for name, words in _KINDS.items() if name != kind for word in words]
    right = rng.choice(_KINDS[kind])
    words = [right, *rng.sample(others, 2)]
    rng.shuffle(words)
    return f"Which of these is a {kind}: {', '.join(words)}?", f"The {kind} is {right}."


def _day(rng: Random) -> Pair:
    at, word = rng.randrange(7), rng.choice(_WORDS)
    step, relation = rng.choice(((1, "after"), (-1, "before")))
    return (
        f"Say which day comes {relation} {_DAYS[at]} and add the word {word}.",
        f"{_DAYS[(at + step) % 7]}, {word}",
    )


def _greet(rng: Random) -> Pair:
    name, city = rng.choice(generator.GIVEN_NAMES), rng.choice(generator.CITIES)
    word = rng.choice(_WORDS)
    return (
        f"Write a greeting to {name} from {city} about the {word}.",
        f"Dear {name},\nmany greetings from {city}! I thought of you when I saw the {word}.",
    )


def _fact(rng: Random) -> Pair:
    (question, answer), word = rng.choice(FACTS), rng.choice(_WORDS)
    return f"{question} End with the word {word}.", f"{answer} {word}"


_FAMILIES = (
    _of_words("Reverse the order of these words", " ", 2, 4, lambda w: " ".join(reversed(w))),
    _of_words("Sort these words by the alphabet", ", ", 3, 4, lambda w: ", ".join(sorted(w))),
    _of_words("Write in capital letters", " ", 2, 3, lambda w: " ".join(w).upper()),
    _of_words("Turn this into a list with dashes", ", ", 2, 4, lambda w: "- " + "\n- ".join(w)),
    *(_pick, _day, _greet),
    _of_words("Count the words", " ", 2, 6, lambda w: f"There are {len(w)} words."),
    _fact,
)


generate = partial(generator.generate_records, make_record)
