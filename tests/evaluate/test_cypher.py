"""Cypher is equal up to layout, variable names and rewrites that preserve the answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.tasks.cypher import Cypher

judge_cypher = Cypher.judge_texts

QUERY = "MATCH (p:Person {name: 'Ada'})-[r:KNOWS]->(q) WHERE p.age >= 3 RETURN q.name AS n LIMIT 5"


NO_QUERY = (
    *("RETURN 'a", "RETURN `a", "/* RETURN 1", "RETURN #", "a\0", "\ud800", "MATCH (n)"),
    *("MATCH (n:Person RETURN n", "MATCH (n) RETURN n; MATCH (n) RETURN n"),
    *(
        "MATCH (n) RETURN foo { (n)-->() }",
        "SELECT name FROM person",
        QUERY + "; MATCH (n) DETACH DELETE n",
    ),
)


def test_a_text_that_is_not_a_query_has_a_reason() -> None:
    for text in ("", " \n", ";", "// nothing", "```\n```"):
        assert judge_cypher(text, QUERY).kind == "empty"
    for text in NO_QUERY:
        verdict = judge_cypher(text, QUERY)
        assert verdict.kind == "did_not_parse" and verdict.detail
    for text in ("", "RETURN 'a"):
        with pytest.raises(EvaluationError, match="reference is empty or not Cypher"):
            judge_cypher("RETURN 1", text)


def test_words_are_compared_if_the_parser_gives_up_or_the_reference_does_not_parse() -> None:
    deep = "MATCH (n) WHERE " + "NOT (" * 12 + "n.a = 1" + ")" * 12 + " RETURN n"
    verdict = judge_cypher(deep, QUERY)
    assert verdict.kind == "different"
    assert verdict.detail.startswith("only words compared: gave up after")
    assert judge_cypher(deep, deep.replace("MATCH", "match")).correct
    gap = "MATCH (q:Question) WHERE size((q)-[:TAGGED]->(:Tag)) = 3 RETURN q"
    verdict = judge_cypher("no query at all", gap)
    assert verdict.kind == "different"
    assert verdict.detail.startswith("only words compared: in the reference, near line 1")
    assert judge_cypher(gap.replace("WHERE", "where"), gap).correct


@given(st.text())
def test_any_text_gets_a_verdict(text: str) -> None:
    kinds = {"correct", "empty", "different", "did_not_parse"}
    assert judge_cypher(text, QUERY).kind in kinds


SAME = [
    # Layout, keyword case, and variable names.
    (QUERY, "match" + QUERY[5:].replace("WHERE", "where").replace("RETURN", "Return")),
    (QUERY, QUERY.replace(" ", "\n  ").replace("'", '"') + " ; "),
    (QUERY, QUERY.replace("WHERE", "// why\nWHERE /* p.x */")),
    (QUERY, "```cypher\n" + QUERY + "\n```"),
    ("MATCH (p:Person) RETURN p", "MATCH (`a b`:`Person`) RETURN `a b`"),
    ("MATCH (n) RETURN count(n) AS count", "MATCH (n) RETURN COUNT(n) AS c"),
    ("WITH [x IN xs | x.name] AS l RETURN l", "WITH [y IN zs | y.name] AS m RETURN m"),
    ("RETURN 'it\\'s'", 'RETURN "it\'s"'),
    ("MATCH (a) WHERE EXISTS { (a)-->(b) } RETURN a", "MATCH (c) WHERE exists{(c)-->(d)} RETURN c"),
    ("MATCH (a)-[*1..3]->(b) RETURN a", "MATCH (x) - [ * 1 .. 3 ] -> (y) RETURN x"),
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
    # Unused variables.
    ("MATCH (a:P)-[r:R]->(b:Q) RETURN a", "MATCH (a:P)-[:R]->(:Q) RETURN a"),
    # Direction.
    ("MATCH (a:P)-[:R]->(b:Q) RETURN a, b", "MATCH (b:Q)<-[:R]-(a:P) RETURN a, b"),
    (
        "MATCH (a:A)-[:R]->(b:B)<-[:S]-(c:C) WHERE c.x = 1 RETURN a",
        "MATCH (c:C)-[:S]->(b:B)<-[:R]-(a:A) WHERE c.x = 1 RETURN a",
    ),
    # Comparisons, mirrored and negated.
    ("MATCH (n) WHERE 5 < n.age RETURN n", "MATCH (m) WHERE (m.age > 5) RETURN m"),
    ("MATCH (n) WHERE -5.5 >= n.a + 1 RETURN n", "MATCH (n) WHERE n.a + 1 <= -5.5 RETURN n"),
    ("MATCH (n {x: 1}) RETURN n", "MATCH (n) WHERE 1 = n.x RETURN n"),
    (
        "MATCH (a)-->(b) WHERE a.x = b.x AND size(b.l) > $n RETURN a",
        "MATCH (q)<--(p) WHERE $n < size(q.l) AND q.x = p.x RETURN p",
    ),
    ("MATCH (n) WHERE NOT n.x = 1 RETURN n", "MATCH (n) WHERE n.x <> 1 RETURN n"),
    ("MATCH (n) WHERE NOT (1 <> n.x) RETURN n", "MATCH (n) WHERE n.x = 1 RETURN n"),
    # A node or relationship that every row has is counted like the row.
    ("MATCH (p:P) RETURN count(p)", "MATCH (:P) RETURN count(*)"),
    (
        "MATCH (p:P)-[r:R]->(m) WITH p, count(m) AS n WHERE 3 < n RETURN p.name ORDER BY n",
        "MATCH (p:P)-[r:R]->() WITH p, COUNT(r) AS n WHERE n > 3 RETURN p.name ORDER BY n",
    ),
    # Column names.
    (
        "MATCH (p:P) RETURN p.name AS name, count(*) AS n ORDER BY n DESC, name LIMIT 3",
        "MATCH (p:P) RETURN p.name, count(*) ORDER BY count(*) DESC, p.name ASC LIMIT 3",
    ),
    ("MATCH (p)-->(q) RETURN q.name AS q", "MATCH (p)-->(q) RETURN q.name"),
]
DIFFERENT = [
    (QUERY, QUERY.replace("Person", "person")),
    (QUERY, QUERY.replace("Ada", "Bob")),
    (QUERY, QUERY.replace("->", "-")),
    ("MATCH (a), (b) RETURN a", "MATCH (a), (a) RETURN a"),
    ("MATCH (n:(A|!B)&C) RETURN n", "MATCH (n:(A|!D)&C) RETURN n"),
    ("MATCH ()-[:A|:B]-() RETURN 1", "MATCH ()-[:A|:C]-() RETURN 1"),
    ("MATCH (n) WHERE n:A RETURN n", "MATCH (n) WHERE n:B RETURN n"),
    ("MATCH (n) WHERE n.x = $a RETURN n", "MATCH (n) WHERE n.x = $b RETURN n"),
    ("RETURN apoc.text.join(x)", "RETURN apoc.text.Join(x)"),
    ("RETURN toLower(x)", "RETURN toUpper(x)"),
    ("CALL db.labels() YIELD label RETURN label", "CALL db.labels() YIELD x RETURN x"),
    ("SHOW INDEXES", "SHOW DATABASES"),
    ("RETURN '\\\\'", "RETURN '\\''"),
    ("RETURN a.order", "RETURN a.ORDER"),
    ("RETURN 'a'", "RETURN a"),
    ("RETURN 1", "RETURN 1.0"),
    ("MATCH (a:P)-[:R]->(b:Q) RETURN a", "MATCH (a:P)<-[:R]-(b:Q) RETURN a"),
    ("MATCH p = (a:P)-[:R]->(b:Q) RETURN p", "MATCH p = (b:Q)<-[:R]-(a:P) RETURN p"),
    ("MATCH (a:P)-[r:R*1..3]->(b:Q) RETURN r", "MATCH (b:Q)<-[r:R*1..3]-(a:P) RETURN r"),
    (
        "MATCH (m), (n) WHERE m:C AND n:A|B RETURN m, n",
        "MATCH (m), (n) WHERE n:A AND m:C|B RETURN m, n",
    ),
    (
        "MATCH (n {a: 1}) WHERE n.b = 2 OR n.c = 3 RETURN n",
        "MATCH (n) WHERE n.a = 1 AND n.b = 2 OR n.c = 3 RETURN n",
    ),
    # NaN is neither below 1 nor at least 1; a chain is two comparisons; arrows are not comparisons.
    ("MATCH (n) WHERE NOT n.x < 1 RETURN n", "MATCH (n) WHERE n.x >= 1 RETURN n"),
    ("MATCH (n) WHERE NOT n.x < 1 RETURN n", "MATCH (n) WHERE NOT n.x > 1 RETURN n"),
    ("MATCH (n) WHERE 1 < n.x RETURN n", "MATCH (n) WHERE n.x < 1 RETURN n"),
    ("MATCH (n) WHERE 1 < n.x < 5 RETURN n", "MATCH (n) WHERE 1 < n.x > 5 RETURN n"),
    ("MATCH (n) WHERE NOT n.x = 1 = true RETURN n", "MATCH (n) WHERE n.x <> 1 = true RETURN n"),
    ("MATCH (a), (b) WHERE (a)-->(b) RETURN a", "MATCH (a), (b) WHERE (b)-->(a) RETURN a"),
    # Values that are null in some rows or repeat within a row, and values that are not nodes.
    (
        "MATCH (a) OPTIONAL MATCH (a)-->(b) RETURN a, count(b)",
        "MATCH (a) OPTIONAL MATCH (a)-->(b) RETURN a, count(*)",
    ),
    ("MATCH (n) RETURN count(DISTINCT n)", "MATCH (n) RETURN count(*)"),
    ("MATCH (n) RETURN count(n.x)", "MATCH (n) RETURN count(*)"),
    ("MATCH (n) WITH n.x AS n RETURN count(n)", "MATCH (n) WITH n.x AS n RETURN count(*)"),
    (
        "MATCH (a)-[*0..2]->(b) UNWIND [1, null] AS x RETURN count(x)",
        "MATCH (a)-[*0..2]->(b) UNWIND [1, null] AS x RETURN count(*)",
    ),
    # Each hop of a longer path must match the map; the variable is the list of all.
    (
        "MATCH (a:P)-[r:R* {w: 1}]->(b) RETURN count(r)",
        "MATCH (a:P)-[r:R*]->(b) WHERE r.w = 1 RETURN count(r)",
    ),
    # A condition after OPTIONAL MATCH does not apply to the rows before it.
    (
        "MATCH (a:P) OPTIONAL MATCH (a)-->(b {x: 1}) RETURN a, b",
        "MATCH (a:P) OPTIONAL MATCH (a)-->(b) WITH a, b WHERE b.x = 1 RETURN a, b",
    ),
    ("MATCH (a:P)-->(b) RETURN *", "MATCH (a:P)-->() RETURN *"),
    ("MATCH (:P {x: 1}) RETURN *", "MATCH (p:P) WHERE p.x = 1 RETURN *"),
    # A name that hides a variable, or that UNION compares.
    ("MATCH (n:P) RETURN n.name AS n ORDER BY n.age", "MATCH (n:P) RETURN n.name ORDER BY n.age"),
    (
        "MATCH (n:P) RETURN n.a AS x UNION MATCH (n:Q) RETURN n.a AS y",
        "MATCH (n:P) RETURN n.a AS x UNION MATCH (n:Q) RETURN n.a AS x",
    ),
    ("MATCH (n:P) RETURN rand() AS r ORDER BY r", "MATCH (n:P) RETURN rand() ORDER BY rand()"),
    (
        "MATCH (n:P) RETURN n.a AS a, n.b AS b ORDER BY a + b, size([x IN [a] | x])",
        "MATCH (n:P) RETURN n.a AS b, n.b AS a ORDER BY a - b, size([x IN [a] | x])",
    ),
    ("MATCH (n:P) RETURN n.a AS x ORDER BY x DESC", "MATCH (n:P) RETURN n.a AS x ORDER BY x"),
    (
        "RETURN [x IN [1, 2] WHERE x > 1 AND x < 3 | x = 1 AND true]",
        "RETURN [x IN [1, 2] WHERE true AND x < 3 | x = 1 AND x > 1]",
    ),
]


@pytest.mark.parametrize(
    ("left", "right", "kind"),
    [(*pair, "correct") for pair in SAME] + [(*pair, "different") for pair in DIFFERENT],
)
def test_rows_are_the_same_on_every_graph_or_not(left: str, right: str, kind: str) -> None:
    assert (judge_cypher(left, right).kind, judge_cypher(right, left).kind) == (kind, kind)
