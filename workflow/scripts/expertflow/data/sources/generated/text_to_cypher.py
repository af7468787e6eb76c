"""Generate questions about small property graphs and the Cypher that answers them."""

from functools import partial
from random import Random

from msgspec import Struct

from expertflow.data.records import Fields
from expertflow.data.sources.generated import generator

_SHOW = ("List", "Show", "Find", "Return", "Give me")
_COMPARE = (
    (">", ("above", "over", "greater than")),
    ("<", ("below", "under", "less than")),
    (">=", ("of at least",)),
    ("<=", ("of at most",)),
)


class Node(Struct, frozen=True):
    label: str
    nouns: str
    text: generator.Property
    number: generator.Property

    @property
    def pattern(self) -> str:
        return f"(:{self.label} {{name, {self.text.name}, {self.number.name}}})"


def _node(label: str, nouns: str, properties: str) -> Node:
    return Node(label, nouns, *generator.parse_properties(properties))


(_NAME,) = generator.parse_properties("name = given names")
_PERSON = _node("Person", "people", "city = cities; age = 15 to 65 by 5")
_COMPANY = _node("Company", "companies", "country = countries; founded = 1950 to 2025 by 5")
_MOVIE = _node("Movie", "movies", "genre = comedy, crime, drama, horror; year = 1950 to 2025 by 5")
_BOOK = _node("Book", "books", "language = Danish, English, French; pages = 10 to 290 by 10")
_CLUB = _node("Club", "clubs", "sport = chess, hockey, judo, rowing; members = 10 to 290 by 10")
_COURSE = _node("Course", "courses", "level = basic, middle, expert; credits = 1 to 9 by 1")
_DISH = _node("Dish", "dishes", "kitchen = Greek, Indian, Thai; price = 1 to 9 by 1")
_CITY = _node("City", "cities", "region = north, south, east, west; districts = 1 to 9 by 1")

# A node, its relation to another, the verb for it, and the other.
GRAPHS = (
    (_PERSON, "WORKS_AT", "work at", _COMPANY),
    (_PERSON, "ACTED_IN", "acted in", _MOVIE),
    (_PERSON, "WROTE", "wrote", _BOOK),
    (_PERSON, "MEMBER_OF", "are members of", _CLUB),
    (_PERSON, "ENROLLED_IN", "are enrolled in", _COURSE),
    (_PERSON, "COOKED", "cooked", _DISH),
    (_COMPANY, "LOCATED_IN", "are located in", _CITY),
    (_CLUB, "MEETS_IN", "meet in", _CITY),
)


def make_record(rng: Random) -> Fields:
    source, relation, verb, target = rng.choice(GRAPHS)
    path = f"(:{source.label})-[:{relation}]->(:{target.label})"
    if rng.random() < 0.4:
        question, cypher = _ask_nodes(rng, rng.choice((source, target)))
    else:
        question, cypher = _ask_path(rng, source, relation, verb, target)
    schema = f"{source.pattern}; {target.pattern}; {path}"
    return {"question": question, "schema": schema, "cypher": cypher}


def _condition(rng: Random, node: Node, variable: str) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.55:
        text = _NAME if kind < 0.15 else node.text
        value = rng.choice(text.values)
        return f"{text.name} '{value}'", f"{variable}.{text.name} = '{value}'"
    operator, compared = rng.choice(_COMPARE)
    number, words, key = rng.choice(node.number.values), rng.choice(compared), node.number.name
    return f"{key} {words} {number}", f"{variable}.{key} {operator} {number}"


def _ask_nodes(rng: Random, node: Node) -> tuple[str, str]:
    words, where = _condition(rng, node, "n")
    match = f"MATCH (n:{node.label}) WHERE {where}"
    kind = rng.random()
    if kind < 0.3:
        pattern = rng.choice(("How many {} with {} are there?", "Count the {} with {}."))
        return pattern.format(node.nouns, words), f"{match} RETURN count(n)"
    # Names as often as the other two together.
    asked = rng.choice(("name", "name", node.text.name, node.number.name))
    if kind < 0.5:
        n_rows, key = rng.randint(2, 9), node.number.name
        order, direction = rng.choice((("highest", " DESC"), ("lowest", "")))
        question = (
            f"{rng.choice(_SHOW)} the {asked} of the {n_rows} {node.nouns} "
            f"with {words} and the {order} {key}."
        )
        return question, f"{match} RETURN n.{asked} ORDER BY n.{key}{direction} LIMIT {n_rows}"
    question = f"{rng.choice(_SHOW)} the {asked} of {node.nouns} with {words}."
    return question, f"{match} RETURN n.{asked}"


def _ask_path(rng: Random, source: Node, relation: str, verb: str, target: Node) -> tuple[str, str]:
    path = f"MATCH (a:{source.label})-[:{relation}]->(b:{target.label})"
    words, where = _condition(rng, target, "b")
    clause = f"{verb} {target.nouns} with {words}"
    kind = rng.random()
    if kind < 0.25:
        question = f"How many {source.nouns} {clause}?"
        # Several paths may lead from one node.
        return question, f"{path} WHERE {where} RETURN count(DISTINCT a)"
    if kind < 0.4:
        own_words, own = _condition(rng, source, "a")
        question = f"Which {source.nouns} with {own_words} {clause}?"
        return question, f"{path} WHERE {own} AND {where} RETURN DISTINCT a.name"
    asked = rng.choice(("name", "name", source.text.name, source.number.name))
    question = f"{rng.choice(_SHOW)} the {asked} of {source.nouns} that {clause}."
    return question, f"{path} WHERE {where} RETURN DISTINCT a.{asked}"


generate = partial(generator.generate_records, make_record)
