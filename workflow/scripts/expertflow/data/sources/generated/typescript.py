"""Make small TypeScript declarations from descriptions: functions, interfaces, types and enums."""

from collections.abc import Callable
from random import Random

from expertflow.data.sources.generated.writing import Record, build_generator

_ENTITIES = (
    *("User", "Order", "Product", "Invoice", "Ticket", "Book", "Player", "Team", "Account"),
    *("Message", "Event", "Task", "Room", "Course", "Device", "Report", "Song", "Flight"),
)
_TEXT_KEYS = ("name", "title", "email", "city", "color", "status", "label", "code", "owner")
_NUMBER_KEYS = ("price", "age", "total", "score", "count", "size", "weight", "rank", "level")
_FLAG_KEYS = ("active", "open", "paid", "visible", "done", "locked")
_MEMBERS = (
    *("Red", "Green", "Blue", "Small", "Large"),
    *("Open", "Closed", "Draft", "Paid", "High", "Low"),
)
_COMPARE = ((">", ("above", "more than")), ("<", ("below", "less than")), (">=", ("at least",)))

Pair = tuple[str, str]


def make_record(rng: Random) -> Record:
    """Describe one declaration, and write it."""
    description, completion = rng.choice(_FAMILIES)(rng)
    return {"prompt": f"/** {description} */", "completion": completion}


def _many(entity: str) -> str:
    return f"{entity.lower()}s"


def _key(rng: Random) -> Pair:
    """Choose a property and its type."""
    keys = rng.choice(((_TEXT_KEYS, "string"), (_NUMBER_KEYS, "number"), (_FLAG_KEYS, "boolean")))
    return rng.choice(keys[0]), keys[1]


def _filter(rng: Random) -> Pair:
    entity, key = rng.choice(_ENTITIES), rng.choice(_NUMBER_KEYS)
    operator, words = rng.choice(_COMPARE)
    value, many = rng.randint(1, 20) * 5, _many(entity)
    verb = rng.choice(("Keep", "Select", "Return"))
    return (
        f"{verb} the {many} whose {key} is {rng.choice(words)} {value}.",
        f"function filter{entity}s({many}: {entity}[]): {entity}[] {{\n"
        f"  return {many}.filter((item) => item.{key} {operator} {value});\n}}",
    )


def _flagged(rng: Random) -> Pair:
    entity, key = rng.choice(_ENTITIES), rng.choice(_FLAG_KEYS)
    many, negated = _many(entity), rng.random() < 0.5
    return (
        f"{rng.choice(('Count', 'Tell how many are among'))} the {many} that are "
        f"{'not ' if negated else ''}{key}.",
        f"function count{entity}s({many}: {entity}[]): number {{\n"
        f"  return {many}.filter((item) => {'!' if negated else ''}item.{key}).length;\n}}",
    )


def _pluck(rng: Random) -> Pair:
    entity, (key, kind) = rng.choice(_ENTITIES), _key(rng)
    many = _many(entity)
    return (
        f"{rng.choice(('List', 'Collect', 'Return'))} the {key} of all {many}, a {kind} each.",
        f"function {key}Of{entity}s({many}: {entity}[]): {kind}[] {{\n"
        f"  return {many}.map((item) => item.{key});\n}}",
    )


def _total(rng: Random) -> Pair:
    entity, key = rng.choice(_ENTITIES), rng.choice(_NUMBER_KEYS)
    many = _many(entity)
    return (
        f"{rng.choice(('Add up', 'Sum'))} the {key} of the {many}.",
        f"function total{entity}s({many}: {entity}[]): number {{\n"
        f"  return {many}.reduce((sum, item) => sum + item.{key}, 0);\n}}",
    )


def _sorted(rng: Random) -> Pair:
    entity, key = rng.choice(_ENTITIES), rng.choice(_NUMBER_KEYS)
    many, falling = _many(entity), rng.random() < 0.5
    order = f"b.{key} - a.{key}" if falling else f"a.{key} - b.{key}"
    return (
        f"{rng.choice(('Sort', 'Order'))} the {many} by {key}, "
        f"{'highest' if falling else 'lowest'} first.",
        f"function sort{entity}s({many}: {entity}[]): {entity}[] {{\n"
        f"  return [...{many}].sort((a, b) => {order});\n}}",
    )


def _find(rng: Random) -> Pair:
    entity, (key, kind) = rng.choice(_ENTITIES), _key(rng)
    many = _many(entity)
    return (
        f"{rng.choice(('Find', 'Look up'))} one of the {many} by its {key}, a {kind}.",
        f"function find{entity}({many}: {entity}[], {key}: {kind}): {entity} | undefined {{\n"
        f"  return {many}.find((item) => item.{key} === {key});\n}}",
    )


def _interface(rng: Random) -> Pair:
    entity = rng.choice(_ENTITIES)
    keys = [_key(rng) for _ in range(rng.randint(2, 3))]
    keys = list(dict(keys).items())
    optional = rng.random() < 0.3
    told = ", ".join(f"{key} ({kind})" for key, kind in keys)
    lines = [f"  {key}: {kind};\n" for key, kind in keys]
    if optional:
        lines[-1] = lines[-1].replace(":", "?:")
    return (
        f"{rng.choice(('Describe', 'Declare'))} a {entity} with {told}"
        f"{', the last optional' * optional}.",
        f"interface {entity} {{\n{''.join(lines)}}}",
    )


def _enum(rng: Random) -> Pair:
    entity, members = rng.choice(_ENTITIES), rng.sample(_MEMBERS, rng.randint(2, 3))
    lines = "".join(f'  {member} = "{member}",\n' for member in members)
    return (
        f"{rng.choice(('Enumerate', 'Name'))} the kinds of {entity}: {', '.join(members)}.",
        f"enum {entity}Kind {{\n{lines}}}",
    )


def _guard(rng: Random) -> Pair:
    entity, (key, kind) = rng.choice(_ENTITIES), _key(rng)
    return (
        f"{rng.choice(('Check', 'Test'))} that a value is a {entity}: its {key} is a {kind}.",
        f"function is{entity}(value: any): value is {entity} {{\n"
        f'  return typeof value?.{key} === "{kind}";\n}}',
    )


def _type(rng: Random) -> Pair:
    entity, key = rng.choice(_ENTITIES), rng.choice((*_TEXT_KEYS, *_NUMBER_KEYS))
    told, utility = rng.choice((("without its", "Omit"), ("with only its", "Pick")))
    return (
        f"{rng.choice(('Name', 'Declare'))} the type of a {entity} {told} {key}.",
        f'type {utility}{entity} = {utility}<{entity}, "{key}">;',
    )


_FAMILIES: tuple[Callable[[Random], Pair], ...] = (
    *(_filter, _flagged, _pluck, _total, _sorted),
    *(_find, _interface, _enum, _guard, _type),
)


generate = build_generator(make_record, key="prompt")
