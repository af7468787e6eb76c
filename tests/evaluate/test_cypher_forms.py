"""Queries that ask the same are equal; those that ask something else are not."""

import pytest

from expertflow.evaluate.cypher.scorer import judge_cypher

SAME = [
    # A map in a pattern is a condition.
    ("MATCH (p:P {name: 'x'}) RETURN p.age", "MATCH (q:P) WHERE q.name = 'x' RETURN q.age"),
    (
        "MATCH (:P {name: 'x'})-[r:R {w: 1}]->(b) WHERE b.a > 1 OR b.c < 2 RETURN b",
        "MATCH (p:P)-[r:R]->(b) WHERE r.w = 1 AND (b.a > 1 OR b.c < 2) AND p.name = 'x' RETURN b",
    ),
    ("MATCH (p {a: 1, b: 'x'}) RETURN p", "MATCH (p {b: 'x', a: 1}) RETURN p"),
    (
        "MATCH (p:P) WHERE EXISTS { MATCH (p)-->(q {a: true}) } RETURN p",
        "MATCH (p:P) WHERE EXISTS { MATCH (p)-->(q) WHERE q.a = true } RETURN p",
    ),
    # Conditions joined by AND have no order.
    (
        "MATCH (p:P) WHERE p.a > 1 AND p.b = 'x' RETURN p",
        "MATCH (p:P) WHERE p.b = 'x' AND p.a > 1 RETURN p",
    ),
    # Unused variables.
    ("MATCH (a:P)-[r:R]->(b:Q) RETURN a", "MATCH (a:P)-[:R]->(:Q) RETURN a"),
    # Direction.
    ("MATCH (a:P)-[:R]->(b:Q) RETURN a, b", "MATCH (b:Q)<-[:R]-(a:P) RETURN a, b"),
    (
        "MATCH (a:A)-[:R]->(b:B)<-[:S]-(c:C) WHERE c.x = 1 RETURN a",
        "MATCH (c:C)-[:S]->(b:B)<-[:R]-(a:A) WHERE c.x = 1 RETURN a",
    ),
    # Names of columns.
    ("MATCH (p:P) RETURN p.name AS name, p.age", "MATCH (p:P) RETURN p.name, p.age AS years"),
    (
        "MATCH (p:P) RETURN p.name AS name, count(*) AS n ORDER BY n DESC, name LIMIT 3",
        "MATCH (p:P) RETURN p.name, count(*) ORDER BY count(*) DESC, p.name ASC LIMIT 3",
    ),
]
DIFFERENT = [
    ("MATCH (a:P)-[:R]->(b:Q) RETURN a", "MATCH (a:P)<-[:R]-(b:Q) RETURN a"),
    ("MATCH p = (a:P)-[:R]->(b:Q) RETURN p", "MATCH p = (b:Q)<-[:R]-(a:P) RETURN p"),
    (
        "MATCH (a:P)-[r:R*1..3]->(b:Q) RETURN r",
        "MATCH (b:Q)<-[r:R*1..3]-(a:P) RETURN r",
    ),
    (
        "MATCH (p:P) WHERE p.a = 1 AND p.b = 2 OR p.c = 3 RETURN p",
        "MATCH (p:P) WHERE p.b = 2 AND p.a = 1 OR p.c = 3 RETURN 1, p",
    ),
    (
        "MATCH (m), (n) WHERE m:C AND n:A|B RETURN m, n",
        "MATCH (m), (n) WHERE n:A AND m:C|B RETURN m, n",
    ),
    (
        "MATCH (n {a: 1}) WHERE n.b = 2 OR n.c = 3 RETURN n",
        "MATCH (n) WHERE n.a = 1 AND n.b = 2 OR n.c = 3 RETURN n",
    ),
    # Each hop of a longer path must fit the map; the variable is the list of all.
    (
        "MATCH (a:P)-[r:R* {w: 1}]->(b) RETURN count(r)",
        "MATCH (a:P)-[r:R*]->(b) WHERE r.w = 1 RETURN count(r)",
    ),
    # A condition behind OPTIONAL MATCH is not one on the rows before it.
    (
        "MATCH (a:P) OPTIONAL MATCH (a)-->(b {x: 1}) RETURN a, b",
        "MATCH (a:P) OPTIONAL MATCH (a)-->(b) WITH a, b WHERE b.x = 1 RETURN a, b",
    ),
    ("MATCH (a:P)-->(b) RETURN *", "MATCH (a:P)-->() RETURN *"),
    ("MATCH (:P {x: 1}) RETURN *", "MATCH (p:P) WHERE p.x = 1 RETURN *"),
    # A name that hides a variable, or that UNION compares.
    (
        "MATCH (n:P) RETURN n.name AS n ORDER BY n.age",
        "MATCH (n:P) RETURN n.name ORDER BY n.age",
    ),
    (
        "MATCH (n:P) RETURN n.a AS x UNION MATCH (n:Q) RETURN n.a AS y",
        "MATCH (n:P) RETURN n.a AS x UNION MATCH (n:Q) RETURN n.a AS x",
    ),
    ("MATCH (n:P) RETURN rand() AS r ORDER BY r", "MATCH (n:P) RETURN rand() ORDER BY rand()"),
    (
        "MATCH (n:P) RETURN n.a AS x ORDER BY x DESC",
        "MATCH (n:P) RETURN n.a AS x ORDER BY x",
    ),
    (
        "RETURN [x IN [1, 2] WHERE x > 1 AND x < 3 | x = 1 AND true]",
        "RETURN [x IN [1, 2] WHERE true AND x < 3 | x = 1 AND x > 1]",
    ),
]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_same_rows_on_every_graph(left: str, right: str) -> None:
    assert judge_cypher(left, right).correct
    assert judge_cypher(right, left).correct


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_other_rows_on_some_graph(left: str, right: str) -> None:
    assert judge_cypher(left, right).kind == "different"
    assert judge_cypher(right, left).kind == "different"
