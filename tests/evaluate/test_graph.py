"""Cypher judged by the rows of a small graph, and hostile queries, which do no harm."""

import importlib.util
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from made_up_documents import score, spec

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.records import Judgment
from expertflow.evaluate.tasks import cypher
from expertflow.evaluate.tasks.cypher import Cypher, GraphServer

needs_engine = pytest.mark.extra("graph")
SCRIPT = """// People and films.
CREATE (p:Person {name: 'Ada', born: 1815})
CREATE (p:Person {name: 'Bob', born: 1900});
CREATE (p:Person {name: 'Cy', born: 1900})

CREATE (m:Movie {title: 'M', year: 1931})
CREATE (m:Movie {title: 'N', year: 1950})
MATCH (p:Person), (m:Movie {title: 'M'}) CREATE (p)-[:ACTED_IN {fee: 2}]->(m)
MATCH (p:Person {name: 'Ada'}), (m:Movie {title: 'N'}) CREATE (p)-[:ACTED_IN {fee: 3}]->(m)
"""
SCHEMA = "(:Person {name, born}); (:Movie {title, year}); (:Person)-[:ACTED_IN {fee}]->(:Movie)"
REFERENCE = "MATCH (p:Person)-[:ACTED_IN]->(m:Movie) WHERE m.year < 1940 RETURN p.name"
ORDERED = "MATCH (p:Person) RETURN p.name ORDER BY p.name"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "graph.cypher"
    # With a byte order mark, as some editors write it.
    path.write_text(SCRIPT, "utf-8-sig")
    return path


@pytest.fixture
def server(script: Path) -> Iterator[GraphServer]:
    with closing(GraphServer(script)) as running:
        yield running


def judge(graph: Path, prediction: str, reference: str = REFERENCE) -> Judgment:
    [judgment] = score(Cypher, [prediction], reference, artifacts={"graph": graph}, schema=SCHEMA)
    return judgment


@needs_engine
def test_verdicts(script: Path) -> None:
    cases = [
        # An equivalent query that normal forms do not cover.
        ("MATCH (m:Movie {title: 'M'}) MATCH (m)<--(p) RETURN p.name AS n", REFERENCE, "correct"),
        ("MATCH (p:Person) RETURN p.name ORDER BY p.name DESC", REFERENCE, "correct"),
        ("MATCH (p:Person) RETURN p.name ORDER BY p.name DESC", ORDERED, "wrong_rows"),
        ("MATCH (p:Person) WHERE p.born > 0 RETURN p.name ORDER BY p.name", ORDERED, "correct"),
        ("MATCH (p:Person) RETURN DISTINCT p.born", REFERENCE, "wrong_rows"),
        ("MATCH (p)-[r:ACTED_IN]->() RETURN p.name, sum(r.fee), collect(1 + 1), true",
         "MATCH (p:Person)-[r:ACTED_IN]->(m) RETURN p.name, sum(r.fee), collect(2), 1 = 1",
         "correct"),
        ("MATCH (p:Person)<-[:ACTED_IN]-(m:Movie) RETURN p.name", REFERENCE, "wrong_direction"),
        ("MATCH (p:Actor) RETURN p.name", REFERENCE, "unknown_label"),
        ("MATCH (p:Person RETURN p.name", REFERENCE, "did_not_parse"),
        ("MATCH (p:Person) RETURN p.name, p.name", REFERENCE, "not_executed"),
        ("", REFERENCE, "empty"),
        ("CREATE (n:Person {name: 'Eve'}) RETURN n.name", REFERENCE, "not_executed"),
        ("UNWIND range(1, 100000000) AS x RETURN x", REFERENCE, "timed_out"),
    ]  # fmt: skip
    predictions, references, kinds = map(list, zip(*cases, strict=True))
    files = {"graph": script}
    found = score(Cypher, predictions, references, artifacts=files, schema=SCHEMA)
    assert [verdict.kind for verdict in found] == kinds
    assert [verdict.correct for verdict in found] == [kind == "correct" for kind in kinds]


@needs_engine
def test_empty_rows_prove_nothing(script: Path) -> None:
    none = "MATCH (p:Person) WHERE p.born > 3000 RETURN p.name"
    nulls = "MATCH (p:Person) RETURN p.nada"
    answers = [none.replace("3000", "3001"), nulls.replace("nada", "nope"), none, nulls]
    found = score(Cypher, answers, [none, nulls] * 2, artifacts={"graph": script})
    assert [one.kind for one in found] == ["different", "different", "correct", "correct"]
    for verdict, what in zip(found, ("nothing", "nothing but nulls"), strict=False):
        assert verdict.detail == f"both return {what}, which proves nothing"


@needs_engine
def test_parsing_happens_in_a_separate_process(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cypher, "judge_texts", None)
    monkeypatch.setattr(cypher, "read_query", None)
    assert judge(script, "MATCH (p:Person) RETURN p.name").correct


@needs_engine
def test_odd_text_and_results_do_not_end_the_process(server: GraphServer) -> None:
    assert server.run_query("RETURN 1").rows
    nested = "RETURN " + "[" * 1_500 + "1" + "]" * 1_500
    for query in (nested, "RETURN '\ud800'", "RETURN '\\ud800' AS x"):
        answer = server.run_query(query)
        assert (answer.kind, "process" in answer.detail) == ("not_executed", False)
        assert server._worker.is_running


def test_unreadable_rows_are_a_verdict(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphServer, "run_query", lambda *_: "\ud800".encode())
    verdict = judge(script, "MATCH (p:Person) RETURN p.name")
    assert (verdict.kind, "UnicodeEncodeError" in verdict.detail) == ("not_executed", True)


@needs_engine
def test_a_reference_that_the_engine_rejects_is_compared_by_form(script: Path) -> None:
    reference = "MATCH (p:Person) CALL db.labels() YIELD label RETURN p.name, label"
    verdict = judge(script, "MATCH (p:Person) RETURN p.name", reference)
    assert verdict.kind == "different"
    assert verdict.detail.startswith("the reference was not executed: ")
    assert judge(script, reference, reference).correct


HOSTILE = [
    "LOAD CSV FROM '{secret}' AS line RETURN line",
    "LOAD CSV FROM 'file://{secret}' AS line RETURN line",
    "CREATE (x:Person {name: 'Eve'})",
    "MATCH (n:Person) SET n.name = 'Eve'",
    "MATCH (n) DETACH DELETE n",
    'MATCH (n {name: "x\'); DROP TABLE nodes; --"}) RETURN n',
    "RETURN load_extension('{secret}')",
    "RETURN readfile('{secret}')",
    "UNWIND range(1, 1000000000) AS x UNWIND range(1, 1000000000) AS y RETURN count(*)",
    "RETURN reduce(s = 'a', x IN range(1, 60) | s + s)",
    "RETURN '" + "x" * 1_000_000 + "'",
    "RETURN " + "(" * 20_000 + "1" + ")" * 20_000,
    "MATCH " + ", ".join(f"(n{i})" for i in range(200)) + " RETURN count(*)",
    "MATCH (a)-[*]-(b)-[*]-(c)-[*]-(d)-[*]-(e) RETURN count(*)",
]


@needs_engine
def test_hostile_queries_harm_nothing(server: GraphServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a-secret-of-the-machine")
    before = sorted(path.name for path in tmp_path.iterdir())
    for query in HOSTILE:
        answer = server.run_query(query.replace("{secret}", str(secret)))
        assert "a-secret" not in repr(answer)
        assert sorted(path.name for path in tmp_path.iterdir()) == before, query[:99]
        # The graph is unchanged, even if its process had to be restarted.
        count = server.run_query("MATCH (p:Person) RETURN p.name ORDER BY p.name")
        assert count.rows == (("text Ada",), ("text Bob",), ("text Cy",)), query[:99]


@needs_engine
def test_a_graph_that_cannot_be_built_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "graph.cypher"
    path.write_text("CREATE (a:A)\nCREATE (b:")
    for graph, message in ((path, "line 2"), (tmp_path / "none", "No such file")):
        with pytest.raises(EvaluationError, match=message):
            judge(graph, "MATCH (p) RETURN p")


def test_the_metric_and_what_is_needed_follow_the_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Cypher(spec(task="cypher"))
    executed = Cypher(spec(task="cypher", artifacts={"graph": "graph.cypher"}))
    assert (plain.metric, executed.metric) == ("normalized_match", "execution_accuracy")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert plain.unavailable_reason() is None
    assert "pip install -r envs/requirements-graph.lock" in str(executed.unavailable_reason())
