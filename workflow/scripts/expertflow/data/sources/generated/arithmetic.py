"""Generate word problems, solved in short steps that end in ``#### n``."""

import operator
from collections.abc import Callable
from random import Random

from expertflow.data.records import Fields
from expertflow.data.sources.generated import generator

_THINGS = (
    *("apples", "books", "cards", "coins", "eggs", "flowers", "keys", "marbles", "nuts", "pears"),
    *("pens", "plums", "rings", "shells", "stamps", "stones", "toys", "tickets"),
)
_BOXES = ("bags", "baskets", "boxes", "crates", "jars", "packs")
_GAINS = ("buys", "finds", "gets", "is given", "wins", "picks")
_LOSSES = ("gives away", "loses", "sells", "uses", "drops")
_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}

# Operators of the steps, numbers, wordings.
Problem = tuple[str, list[int], tuple[str, ...]]


def make_record(rng: Random) -> Fields:
    family = rng.choice(_FAMILIES)
    words = {"name": rng.choice(generator.GIVEN_NAMES), "things": rng.choice(_THINGS)}
    if family not in (_change, _two_changes):
        words["boxes"] = rng.choice(_BOXES)
    signs, numbers, patterns = family(rng)
    words |= dict(zip(("first", "second", "third"), map(str, numbers), strict=False))
    question = generator.fill_pattern(rng, *patterns, gains=_GAINS, loses=_LOSSES, **words)
    result, steps = numbers[0], []
    for sign, number in zip(signs, numbers[1:], strict=True):
        before, result = result, _SIGNS[sign](result, number)
        steps.append(f"{before} {sign} {number} = {result}")
    answer = "\n".join([*steps, f"#### {result}"])
    return {"question": question, "answer": answer, "final": str(result)}


def _numbers(rng: Random, most: int = 9) -> list[int]:
    return [rng.randint(2, most), rng.randint(2, most)]


def _change(rng: Random) -> Problem:
    first, second = _numbers(rng)
    is_gain = rng.random() < 0.5 or second >= first
    verb = rng.choice(_GAINS if is_gain else _LOSSES)
    patterns = (
        "{name} has {first} {things} and {verb} {second}. How many {things} are there now?",
        "There are {first} {things}. Then {name} {verb} {second}. How many {things} in all?",
        "{name} starts with {first} {things}, then {verb} {second}. How many {things} now?",
    )
    told = tuple(pattern.replace("{verb}", verb) for pattern in patterns)
    return "+" if is_gain else "-", [first, second], told


def _two_changes(rng: Random) -> Problem:
    first, second = _numbers(rng)
    # Nobody gives away more than there is.
    third = rng.randint(2, min(9, first + second))
    pattern = (
        "{name} has {first} {things}, {gains} {second} and {loses} {third}. "
        "How many {things} are left?"
    )
    return "+-", [first, second, third], (pattern,)


def _boxes(rng: Random) -> Problem:
    patterns = (
        "{name} has {first} {boxes} with {second} {things} each. How many {things} in all?",
        "Each of the {first} {boxes} of {name} holds {second} {things}. How many {things}?",
    )
    return "*", _numbers(rng), patterns


def _shares(rng: Random) -> Problem:
    boxes, each = _numbers(rng)
    pattern = (
        "{name} puts {first} {things} evenly into {second} {boxes}. How many {things} are in each?"
    )
    # A product first, so that the division leaves nothing over.
    return "/", [boxes * each, boxes], (pattern,)


def _boxes_and_more(rng: Random) -> Problem:
    pattern = (
        "{name} has {first} {boxes} with {second} {things} each and {gains} {third} more. "
        "How many {things} in all?"
    )
    return "*+", [*_numbers(rng, most=5), rng.randint(2, 9)], (pattern,)


_FAMILIES: tuple[Callable[[Random], Problem], ...] = (
    *(_change, _change, _two_changes),
    *(_boxes, _shares, _boxes_and_more),
)


generate = generator.build_generator(make_record, key="question")
