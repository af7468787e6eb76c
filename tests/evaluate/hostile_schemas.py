"""JSON Schemas, each with a document, that would take minutes or gigabytes to judge."""

from functools import reduce
from typing import Any

Pairs = dict[str, tuple[Any, Any]]


def _nest(n: int, inner: Any, key: str, copies: int) -> Any:
    return reduce(lambda schema, _: {key: [schema] * copies}, range(n), inner)


def _references(n: int, copies: int) -> dict[str, Any]:
    links = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * copies} for i in range(n)}
    return {"$defs": {**links, f"d{n}": {}}, "$ref": "#/$defs/d0"}


def _keys(n: int) -> dict[str, Any]:
    return {f"k{i}": i for i in range(n)}


def hostile_schemas() -> Pairs:
    patterns = {f"^(a|aa)+{i}$": {} for i in range(200)}
    unevaluated = {"properties": {}, "unevaluatedProperties": False}
    typed = {"type": "object", "properties": {"a": {"type": ["string", "null"]}}}
    integers = {key: {"type": "integer"} for key in _keys(60_000)}
    parts = {f"d{i}": {"$defs": {f"e{k}": {} for k in range(30)}} for i in range(500)}
    return {
        "references that double": (_references(30, 2), 1),
        "references by the thousand": (_references(2, 3_000), 1),
        "an anchor nowhere": ({"$defs": parts, "items": {"$ref": "#nope"}}, [1]),
        "repeats of repeats": ({"pattern": "(?:(?:a{1,999}){1,999}){1,999}b"}, "a" * 5_000),
        "a billion repeats": ({"pattern": "a{1,1000000000}b"}, "a" * 100_000),
        "a pattern without end": ({"pattern": "^(a|aa)+$"}, "a" * 60 + "!"),
        "many slow patterns": ({"items": {"pattern": "^(a|aa)+$"}}, ["a" * 24, "a" * 40 + "!"]),
        "a long pattern": ({"pattern": "a?" * 30_000 + "a" * 30_000}, "a" * 30_000),
        "many alternatives": ({"pattern": "|".join(f"(a{i}.*)+x" for i in range(20_000))}, "aa"),
        "many patterns and keys": (
            {"patternProperties": patterns},
            {"a" * 25 + key: 1 for key in _keys(300)},
        ),
        "patterns of what is left over": (
            {"patternProperties": {"^(a|aa)+$": {}}, "unevaluatedProperties": False},
            {"a" * 40 + "!": 1},
        ),
        "what is left over of what is left over": (
            {**_nest(3, unevaluated, "anyOf", 40), **unevaluated},
            {"a": 1},
        ),
        "alternatives that nest": ({"items": _nest(14, {"type": "string"}, "anyOf", 2)}, [1] * 20),
        "lists of lists": (
            {"contains": {"contains": {"contains": {"const": 1}}}},
            [[[0] * 100] * 100] * 100,
        ),
        "one of many": (
            {"items": {"oneOf": [{"required": [f"p{i}"], "maxItems": 1} for i in range(9_000)]}},
            [{"a": 1}] * 500,
        ),
        "keys by the ten thousand": ({"properties": integers}, _keys(60_000)),
        "definitions by the ten thousand": (
            {"$defs": {f"d{i}": typed for i in range(20_000)}},
            1,
        ),
        "conditions by the hundred thousand": ({"allOf": [{"minimum": 0}] * 100_000}, 1),
    }  # fmt: skip
