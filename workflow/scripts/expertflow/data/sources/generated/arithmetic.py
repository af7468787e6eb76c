"""Make word problems solved in short steps that end in ``#### n``."""

from collections.abc import Callable
from random import Random

from expertflow.data.sources.generated.words import GIVEN_NAMES
from expertflow.data.sources.generated.writing import Record, build_generator

_THINGS = (
    *("apples", "books", "cards", "coins", "eggs", "flowers", "keys", "marbles", "nuts", "pears"),
    *("pens", "plums", "rings", "shells", "stamps", "stones", "toys", "tickets"),
)
_BOXES = ("bags", "baskets", "boxes", "crates", "jars", "packs")
_GAINS = ("buys", "finds", "gets", "is given", "wins", "picks")
_LOSSES = ("gives away", "loses", "sells", "uses", "drops")

Problem = tuple[str, list[str], int]


def make_record(rng: Random) -> Record:
    """Tell one problem of one or two steps."""
    question, steps, result = rng.choice(_FAMILIES)(rng)
    answer = "\n".join([*steps, f"#### {result}"])
    return {"question": question, "answer": answer, "final": str(result)}


def _change(rng: Random) -> Problem:
    name, things = rng.choice(GIVEN_NAMES), rng.choice(_THINGS)
    first, second = rng.randint(2, 9), rng.randint(2, 9)
    if rng.random() < 0.5 or second >= first:
        verb, sign, result = rng.choice(_GAINS), "+", first + second
    else:
        verb, sign, result = rng.choice(_LOSSES), "-", first - second
    question = rng.choice(
        (
            f"{name} has {first} {things} and {verb} {second}. How many {things} are there now?",
            f"There are {first} {things}. Then {name} {verb} {second}. How many {things} in all?",
            f"{name} starts with {first} {things}, then {verb} {second}. How many {things} now?",
        )
    )
    return question, [f"{first} {sign} {second} = {result}"], result


def _two_changes(rng: Random) -> Problem:
    name, things = rng.choice(GIVEN_NAMES), rng.choice(_THINGS)
    first, second = rng.randint(2, 9), rng.randint(2, 9)
    between = first + second
    third = rng.randint(2, min(9, between))
    question = (
        f"{name} has {first} {things}, {rng.choice(_GAINS)} {second} and "
        f"{rng.choice(_LOSSES)} {third}. How many {things} are left?"
    )
    steps = [f"{first} + {second} = {between}", f"{between} - {third} = {between - third}"]
    return question, steps, between - third


def _boxes(rng: Random) -> Problem:
    name, things, boxes = rng.choice(GIVEN_NAMES), rng.choice(_THINGS), rng.choice(_BOXES)
    first, second = rng.randint(2, 9), rng.randint(2, 9)
    question = rng.choice(
        (
            f"{name} has {first} {boxes} with {second} {things} each. How many {things} in all?",
            f"Each of the {first} {boxes} of {name} holds {second} {things}. How many {things}?",
        )
    )
    return question, [f"{first} * {second} = {first * second}"], first * second


def _shares(rng: Random) -> Problem:
    name, things, boxes = rng.choice(GIVEN_NAMES), rng.choice(_THINGS), rng.choice(_BOXES)
    first, second = rng.randint(2, 9), rng.randint(2, 9)
    question = (
        f"{name} puts {first * second} {things} evenly into {first} {boxes}. "
        f"How many {things} are in each?"
    )
    return question, [f"{first * second} / {first} = {second}"], second


def _boxes_and_more(rng: Random) -> Problem:
    name, things, boxes = rng.choice(GIVEN_NAMES), rng.choice(_THINGS), rng.choice(_BOXES)
    first, second, third = rng.randint(2, 5), rng.randint(2, 5), rng.randint(2, 9)
    product = first * second
    question = (
        f"{name} has {first} {boxes} with {second} {things} each and {rng.choice(_GAINS)} "
        f"{third} more. How many {things} in all?"
    )
    steps = [f"{first} * {second} = {product}", f"{product} + {third} = {product + third}"]
    return question, steps, product + third


_FAMILIES: tuple[Callable[[Random], Problem], ...] = (
    *(_change, _change, _two_changes),
    *(_boxes, _shares, _boxes_and_more),
)


generate = build_generator(make_record, key="question")
