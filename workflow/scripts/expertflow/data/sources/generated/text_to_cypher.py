"""Make questions about small property graphs and the Cypher queries that answer them."""

from random import Random

from msgspec import Struct

from expertflow.data.sources.generated.words import CITIES, COUNTRIES, GIVEN_NAMES
from expertflow.data.sources.generated.writing import Record, build_generator

_SHOW = ("List", "Show", "Find", "Return", "Give me")
_COMPARE = (
    (">", ("above", "over", "greater than")),
    ("<", ("below", "under", "less than")),
    (">=", ("of at least",)),
    ("<=", ("of at most",)),
)


class Node(Struct, frozen=True, kw_only=True):
    """A kind of node; its text property has few values, its number a range of steps."""

    label: str
    nouns: str
    text: tuple[str, tuple[str, ...]]
    number: tuple[str, range]

    @property
    def pattern(self) -> str:
        """Write the node's part of a schema: its label and properties."""
        return f"(:{self.label} {{name, {self.text[0]}, {self.number[0]}}})"


class Graph(Struct, frozen=True, kw_only=True):
    """Two kinds of nodes, the relation between them, and how people say it."""

    source: Node
    relation: str
    verb: str
    target: Node

    @property
    def schema(self) -> str:
        """Write the graph's schema as one compact line."""
        relation = f"(:{self.source.label})-[:{self.relation}]->(:{self.target.label})"
        return f"{self.source.pattern}; {self.target.pattern}; {relation}"


def _node(
    label: str, nouns: str, text: str, values: tuple[str, ...], number: str, span: range
) -> Node:
    return Node(label=label, nouns=nouns, text=(text, values), number=(number, span))


_AGES, _YEARS = range(15, 70, 5), range(1950, 2026, 5)
_SMALL, _TENS = range(1, 10), range(10, 300, 10)
_PERSON = _node("Person", "people", "city", CITIES, "age", _AGES)
_COMPANY = _node("Company", "companies", "country", COUNTRIES, "founded", _YEARS)
_MOVIE = _node("Movie", "movies", "genre", ("comedy", "crime", "drama", "horror"), "year", _YEARS)
_BOOK = _node("Book", "books", "language", ("Danish", "English", "French"), "pages", _TENS)
_CLUB = _node("Club", "clubs", "sport", ("chess", "hockey", "judo", "rowing"), "members", _TENS)
_COURSE = _node("Course", "courses", "level", ("basic", "middle", "expert"), "credits", _SMALL)
_DISH = _node("Dish", "dishes", "kitchen", ("Greek", "Indian", "Thai"), "price", _SMALL)
_CITY = _node("City", "cities", "region", ("north", "south", "east", "west"), "districts", _SMALL)

GRAPHS = (
    Graph(source=_PERSON, relation="WORKS_AT", verb="work at", target=_COMPANY),
    Graph(source=_PERSON, relation="ACTED_IN", verb="acted in", target=_MOVIE),
    Graph(source=_PERSON, relation="WROTE", verb="wrote", target=_BOOK),
    Graph(source=_PERSON, relation="MEMBER_OF", verb="are members of", target=_CLUB),
    Graph(source=_PERSON, relation="ENROLLED_IN", verb="are enrolled in", target=_COURSE),
    Graph(source=_PERSON, relation="COOKED", verb="cooked", target=_DISH),
    Graph(source=_COMPANY, relation="LOCATED_IN", verb="are located in", target=_CITY),
    Graph(source=_CLUB, relation="MEETS_IN", verb="meet in", target=_CITY),
)


def make_record(rng: Random) -> Record:
    """Ask about the nodes of one kind, or follow the relation from one kind to the other."""
    graph = rng.choice(GRAPHS)
    if rng.random() < 0.4:
        question, cypher = _ask_nodes(rng, rng.choice((graph.source, graph.target)))
    else:
        question, cypher = _ask_path(rng, graph)
    return {"question": question, "schema": graph.schema, "cypher": cypher}


def _condition(rng: Random, node: Node, variable: str) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.15:
        name = rng.choice(GIVEN_NAMES)
        return f"name '{name}'", f"{variable}.name = '{name}'"
    if kind < 0.55:
        key, values = node.text
        value = rng.choice(values)
        return f"{key} '{value}'", f"{variable}.{key} = '{value}'"
    key, span = node.number
    operator, words = rng.choice(_COMPARE)
    value = str(rng.choice(span))
    return f"{key} {rng.choice(words)} {value}", f"{variable}.{key} {operator} {value}"


def _property(rng: Random, node: Node) -> str:
    return rng.choice(("name", "name", node.text[0], node.number[0]))


def _ask_nodes(rng: Random, node: Node) -> tuple[str, str]:
    words, where = _condition(rng, node, "n")
    match = f"MATCH (n:{node.label}) WHERE {where}"
    kind = rng.random()
    if kind < 0.3:
        question = rng.choice(("How many {} with {} are there?", "Count the {} with {}."))
        return question.format(node.nouns, words), f"{match} RETURN count(n)"
    asked = _property(rng, node)
    if kind < 0.5:
        n_rows, key = rng.randint(2, 9), node.number[0]
        order, direction = rng.choice((("highest", " DESC"), ("lowest", "")))
        question = (
            f"{rng.choice(_SHOW)} the {asked} of the {n_rows} {node.nouns} "
            f"with {words} and the {order} {key}."
        )
        return question, f"{match} RETURN n.{asked} ORDER BY n.{key}{direction} LIMIT {n_rows}"
    question = f"{rng.choice(_SHOW)} the {asked} of {node.nouns} with {words}."
    return question, f"{match} RETURN n.{asked}"


def _ask_path(rng: Random, graph: Graph) -> tuple[str, str]:
    source, target = graph.source, graph.target
    path = f"MATCH (a:{source.label})-[:{graph.relation}]->(b:{target.label})"
    words, where = _condition(rng, target, "b")
    told = f"{graph.verb} {target.nouns} with {words}"
    kind = rng.random()
    if kind < 0.25:
        question = f"How many {source.nouns} {told}?"
        return question, f"{path} WHERE {where} RETURN count(DISTINCT a)"
    if kind < 0.4:
        own_words, own = _condition(rng, source, "a")
        question = f"Which {source.nouns} with {own_words} {told}?"
        return question, f"{path} WHERE {own} AND {where} RETURN DISTINCT a.name"
    asked = _property(rng, source)
    question = f"{rng.choice(_SHOW)} the {asked} of {source.nouns} that {told}."
    return question, f"{path} WHERE {where} RETURN DISTINCT a.{asked}"


generate = build_generator(make_record, key="question")
