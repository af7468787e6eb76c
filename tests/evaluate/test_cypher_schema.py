"""The names of a query are checked against the graph's description."""

import pytest

from expertflow.evaluate.cypher.schema import read_schema
from expertflow.evaluate.tasks.cypher import Cypher

judge_cypher = Cypher.judge_texts

SECTIONS = """Node properties:
- **Person**
  - `name`: STRING Example: "Ada: (:Ghost)"
  - `born: INTEGER` Min: 1900, Max: 2000
- **Movie**
  - `title`: STRING
Relationship properties:
- **ACTED_IN**
  - `roles`: LIST
The relationships:
(:Person)-[:ACTED_IN]->(:Movie)
(:Person)-[:FOLLOWS]->(:Person)"""
COMPACT = """Node properties are the following:
Person {name: STRING, born: INTEGER}
Movie {title: STRING}
Relationship properties are the following:
ACTED_IN {roles: LIST}
The relationships are the following:
(:Person)-[:ACTED_IN]->(:Movie)
(:Person)-[:FOLLOWS]->(:Person)"""
RELEVANT = """Graph schema: Relevant node labels and their properties (with datatypes) are:
Person {name: STRING, born: INTEGER}
Movie {title: STRING}

Relevant relationships are:
{'start': Person, 'type': ACTED_IN, 'end': Movie }
{'start': 'Person', 'type': 'FOLLOWS', 'end': 'Person'}

Relevant relationship properties (with datatypes) are:
ACTED_IN {roles: LIST}"""
ONE_LINE = (
    "(:Person {name, born}); (:Movie {title}); "
    "(:Person)-[:ACTED_IN {roles}]->(:Movie); (:Person)-[:FOLLOWS]->(:Person)"
)
AS_JSON = """{"Person": {"type": "node", "properties": {"name": {}, "born": {}}, "relationships":
{"ACTED_IN": {"direction": "out", "labels": ["Movie"], "properties": {"roles": {}}},
"FOLLOWS": {"direction": "out", "labels": ["Person"]}}},
"Movie": {"type": "node", "properties": {"title": {}}, "relationships":
{"ACTED_IN": {"direction": "in", "labels": ["Person"]}}},
"ACTED_IN": {"type": "relationship", "properties": {"roles": {}}}}"""
WRONG_WAY = ("wrong_direction", "the schema has (:Person)-[:ACTED_IN]->(:Movie)")
REFERENCE = "MATCH (p:Person)-[:ACTED_IN]->(m:Movie) RETURN p.name"


def test_known_formats_are_equivalent() -> None:
    for text in (SECTIONS, COMPACT, RELEVANT, ONE_LINE, AS_JSON):
        schema = read_schema(text)
        assert schema is not None
        assert schema.nodes == {"Person": {"name", "born"}, "Movie": {"title"}}
        assert schema.types["ACTED_IN"] == {"roles"}
        assert set(schema.types) == {"ACTED_IN", "FOLLOWS"}
        assert schema.ends == {("Person", "ACTED_IN", "Movie"), ("Person", "FOLLOWS", "Person")}


def test_labels_without_properties_prove_nothing_about_properties() -> None:
    text = "Graph schema: Relevant node labels and their properties are:\nPerson\nMovie"
    assert judge_cypher("MATCH (p:Person) RETURN p.shoe", REFERENCE, text).kind == "different"
    assert judge_cypher("MATCH (p:Dog) RETURN p", REFERENCE, text).kind == "unknown_label"


@pytest.mark.parametrize(
    ("query", "kind", "detail"),
    [
        ("MATCH (p:Actor) RETURN p", "unknown_label", ":Actor"),
        ("MATCH (p) WHERE (p:Actor) RETURN p", "unknown_label", ":Actor"),
        ("MATCH (p:Person)-[:PLAYED]->(m) RETURN m", "unknown_relationship", ":PLAYED"),
        ("MATCH (p:Person) RETURN p.title", "unknown_property", "title (of :Person)"),
        ("MATCH (p:Person {title: 'x'}) RETURN p", "unknown_property", "title (of :Person)"),
        ("MATCH (n) RETURN n.shoe", "unknown_property", "shoe (of no label or type)"),
        ("MATCH ()-[r:ACTED_IN]->() RETURN r.name", "unknown_property", "name (of :ACTED_IN)"),
        ("MATCH (p:Person)<-[:ACTED_IN]-(m:Movie) RETURN p", *WRONG_WAY),
        ("MATCH (m:Movie) MATCH (p:Person) MATCH (m)-[:ACTED_IN]->(p) RETURN p.born", *WRONG_WAY),
        # An unknown label comes before an unknown type and an unknown property.
        ("MATCH (p:Actor)-[:X]->(m:Movie {a: 1}) RETURN m.b", "unknown_label", ":Actor"),
        # The query does not determine the labels of these.
        ("MATCH (p:Person) WITH {shoe: 1} AS p RETURN p.shoe", "different", ""),
        ("MATCH (p:Person) RETURN [x IN collect(p) | x.shoe]", "different", ""),
        ("MATCH (p:!Movie) RETURN p.shoe", "different", ""),
        ("MATCH (p:Person)-[:ACTED_IN]-(m:Movie) RETURN p", "different", ""),
        ("MATCH (p:Person)<-[:FOLLOWS]-(q:Person) RETURN p", "different", ""),
        ("MATCH (p:Person) RETURN p.born.year", "different", ""),
        ("MATCH (p:Person|Movie) RETURN p.title", "different", ""),
        ("RETURN 'a (:Ghost) is no label'", "different", ""),
    ],
)
def test_names_missing_in_the_schema(query: str, kind: str, detail: str) -> None:
    verdict = judge_cypher(query, REFERENCE, SECTIONS)
    assert (verdict.kind, verdict.detail) == (kind, detail)
    assert judge_cypher(query, REFERENCE).kind == "different"


@pytest.mark.parametrize("text", ["", "A graph of people.", "{", '{"a": 1}', "[" * 100_000])
def test_an_unknown_schema_format_or_reference_turns_the_check_off(text: str) -> None:
    for reference, schema, why in (
        (REFERENCE, text, "the schema's format is unknown"),
        ("MATCH (p:Ghost) RETURN p", SECTIONS, "the reference has unknown_label :Ghost"),
    ):
        verdict = judge_cypher("MATCH (p:Actor) RETURN p", reference, schema)
        assert (verdict.kind, verdict.detail) == ("different", f"names not checked: {why}")
