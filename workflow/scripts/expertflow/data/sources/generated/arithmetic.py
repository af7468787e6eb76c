"""Generate word problems, solved in short steps that end in ``#### n``."""

import operator
from functools import partial
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
# Operators of the steps, then wordings; a change is either a gain or a loss.
_CHANGE = (
    "±",
    "{name} has {first} {things} and {verb} {second}. How many {things} are there now?",
    "There are {first} {things}. Then {name} {verb} {second}. How many {things} in all?",
    "{name} starts with {first} {things}, then {verb} {second}. How many {things} now?",
)
_FAMILIES: tuple[tuple[str, ...], ...] = (
    _CHANGE,
    _CHANGE,
    (
        "+-",
        "{name} has {first} {things}, {gains} {second} and {loses} {third}. "
        "How many {things} are left?",
    ),
    (
        "*",
        "{name} has {first} {boxes} with {second} {things} each. How many {things} in all?",
        "Each of the {first} {boxes} of {name} holds {second} {things}. How many {things}?",
    ),
    (
        "/",
        "{name} puts {first} {things} evenly into {second} {boxes}. How many {things} are in each?",
    ),
    (
        "*+",
        "{name} has {first} {boxes} with {second} {things} each and {gains} {third} more. "
        "How many {things} in all?",
    ),
)


def make_record(rng: Random) -> Fields:
    signs, *wordings = rng.choice(_FAMILIES)
    words = {"name": rng.choice(generator.GIVEN_NAMES), "things": rng.choice(_THINGS)}
    if signs in ("*", "/", "*+"):
        words["boxes"] = rng.choice(_BOXES)
    numbers = _draw_numbers(rng, signs)
    if signs == "±":
        signs = "+" if rng.random() < 0.5 or numbers[1] >= numbers[0] else "-"
        words["verb"] = rng.choice(_GAINS if signs == "+" else _LOSSES)
    words |= dict(zip(("first", "second", "third"), map(str, numbers), strict=False))
    question = generator.fill_pattern(rng, *wordings, gains=_GAINS, loses=_LOSSES, **words)
    result, steps = numbers[0], []
    for sign, number in zip(signs, numbers[1:], strict=True):
        before, result = result, _SIGNS[sign](result, number)
        steps.append(f"{before} {sign} {number} = {result}")
    answer = "\n".join([*steps, f"#### {result}"])
    return {"question": question, "answer": answer, "final": str(result)}


def _draw_numbers(rng: Random, signs: str) -> list[int]:
    most = 5 if signs == "*+" else 9
    first, second = rng.randint(2, most), rng.randint(2, most)
    if signs == "/":
        # A product first, so that the division leaves no remainder.
        return [first * second, first]
    # Nobody gives away more than there is.
    third = {"+-": min(9, first + second), "*+": 9}.get(signs)
    return [first, second, rng.randint(2, third)] if third else [first, second]


generate = partial(generator.generate_records, make_record)
