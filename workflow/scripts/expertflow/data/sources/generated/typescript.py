"""Generate TypeScript declarations from descriptions: functions, interfaces, types, enums."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from expertflow.data.records import Fields
from expertflow.data.sources.generated import generator

_ENTITIES = (
    *("User", "Order", "Product", "Invoice", "Ticket", "Book", "Player", "Team", "Account"),
    *("Message", "Event", "Task", "Room", "Course", "Device", "Report", "Song", "Flight"),
)
_TEXT_KEYS = ("name", "title", "email", "city", "color", "status", "label", "code", "owner")
# What fills a pattern.
Words = dict[str, Any]
_NUMBER_KEYS = ("price", "age", "total", "score", "count", "size", "weight", "rank", "level")
_FLAG_KEYS = ("active", "open", "paid", "visible", "done", "locked")
_MEMBERS = (
    *("Red", "Green", "Blue", "Small", "Large"),
    *("Open", "Closed", "Draft", "Paid", "High", "Low"),
)
_COMPARE = ((">", ("above", "more than")), ("<", ("below", "less than")), (">=", ("at least",)))


def _key(rng: Random) -> Words:
    keys, kind = rng.choice(
        ((_TEXT_KEYS, "string"), (_NUMBER_KEYS, "number"), (_FLAG_KEYS, "boolean"))
    )
    return {"key": rng.choice(keys), "kind": kind}


def _threshold(rng: Random) -> Words:
    key, (operator, compared) = rng.choice(_NUMBER_KEYS), rng.choice(_COMPARE)
    value = rng.randint(1, 20) * 5
    return {"key": key, "operator": operator, "compared": compared, "value": value}


def _flag(rng: Random) -> Words:
    key, negated = rng.choice(_FLAG_KEYS), rng.random() < 0.5
    return {"key": key, "not_": "not " if negated else "", "sign": "!" if negated else ""}


def _order(rng: Random) -> Words:
    key, falling = rng.choice(_NUMBER_KEYS), rng.random() < 0.5
    first, second, end = ("b", "a", "highest") if falling else ("a", "b", "lowest")
    return {"key": key, "first": first, "second": second, "end": end}


def _fields(rng: Random) -> Words:
    drawn = [_key(rng) for _ in range(rng.randint(2, 3))]
    kinds = {one["key"]: one["kind"] for one in drawn}
    optional = rng.random() < 0.3
    lines = [f"  {key}: {kind};\n" for key, kind in kinds.items()]
    if optional:
        lines[-1] = lines[-1].replace(":", "?:")
    told = ", ".join(f"{key} ({kind})" for key, kind in kinds.items())
    return {"told": told + ", the last optional" * optional, "lines": "".join(lines)}


def _members(rng: Random) -> Words:
    members = rng.sample(_MEMBERS, rng.randint(2, 3))
    lines = "".join(f'  {member} = "{member}",\n' for member in members)
    return {"told": ", ".join(members), "lines": lines}


def _utility(rng: Random) -> Words:
    key = rng.choice((*_TEXT_KEYS, *_NUMBER_KEYS))
    told, utility = rng.choice((("without its", "Omit"), ("with only its", "Pick")))
    return {"key": key, "told": told, "utility": utility}


_DRAWS: dict[str, Callable[[Random], Words]] = {
    "number": lambda rng: {"key": rng.choice(_NUMBER_KEYS)},
    **{"key": _key, "flag": _flag, "threshold": _threshold, "order": _order, "fields": _fields},
    **{"members": _members, "utility": _utility},
}
# What is drawn, a description, and code, in which braces are doubled.
_FAMILIES = """
threshold: {Keep|Select|Return} the {many} whose {key} is {compared} {value}.
function filter{entity}s({many}: {entity}[]): {entity}[] {{
  return {many}.filter((item) => item.{key} {operator} {value});
}}

flag: {Count|Tell how many are among} the {many} that are {not_}{key}.
function count{entity}s({many}: {entity}[]): number {{
  return {many}.filter((item) => {sign}item.{key}).length;
}}

key: {List|Collect|Return} the {key} of all {many}, a {kind} each.
function {key}Of{entity}s({many}: {entity}[]): {kind}[] {{
  return {many}.map((item) => item.{key});
}}

number: {Add up|Sum} the {key} of the {many}.
function total{entity}s({many}: {entity}[]): number {{
  return {many}.reduce((sum, item) => sum + item.{key}, 0);
}}

order: {Sort|Order} the {many} by {key}, {end} first.
function sort{entity}s({many}: {entity}[]): {entity}[] {{
  return [...{many}].sort((a, b) => {first}.{key} - {second}.{key});
}}

key: {Find|Look up} one of the {many} by its {key}, a {kind}.
function find{entity}({many}: {entity}[], {key}: {kind}): {entity} | undefined {{
  return {many}.find((item) => item.{key} === {key});
}}

fields: {Describe|Declare} a {entity} with {told}.
interface {entity} {{
{lines}}}

members: {Enumerate|Name} the kinds of {entity}: {told}.
enum {entity}Kind {{
{lines}}}

key: {Check|Test} that a value is a {entity}: its {key} is a {kind}.
function is{entity}(value: any): value is {entity} {{
  return typeof value?.{key} === "{kind}";
}}

utility: {Name|Declare} the type of a {entity} {told} {key}.
type {utility}{entity} = {utility}<{entity}, "{key}">;
""".strip().split("\n\n")


def make_record(rng: Random) -> Fields:
    head, _, code = rng.choice(_FAMILIES).partition("\n")
    drawn, _, description = head.partition(": ")
    entity = rng.choice(_ENTITIES)
    words = {"entity": entity, "many": f"{entity.lower()}s", **_DRAWS[drawn](rng)}
    told = generator.fill_pattern(rng, description, **words)
    return {"prompt": f"/** {told} */", "completion": code.format(**words)}


generate = partial(generator.generate_records, make_record)
