"""Judge Cypher by what it asks, and where there is a graph to ask, by what that returns.

Forms are judged first, in a process with limits: the parser meets every text before the graph does.
The engine of graphs is an optional extra (envs/requirements-graph.lock), and runs in another
process (``isolation.graph_worker``), which is killed when it overruns the clock.
"""

import importlib.util
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from expertflow.core.errors import EvaluationError
from expertflow.data.checks.cypher import Reading, read_query
from expertflow.evaluate.answer_text import strip_code_fence
from expertflow.evaluate.cypher.forms import common_form
from expertflow.evaluate.cypher.schema import NameFaults, read_schema
from expertflow.evaluate.cypher.tokens import (
    Token,
    classify,
    has_closed_brackets,
    number_variables,
    tokenise,
)
from expertflow.evaluate.isolation import graph_worker
from expertflow.evaluate.isolation.rows import QueryAnswer, same_rows
from expertflow.evaluate.isolation.worker import Worker
from expertflow.evaluate.records import EvaluationSpec, Verdict
from expertflow.evaluate.tasks.base import IsolatedTask, ScoringCase

GRAPH_PACKAGES = ("graphqlite", "apsw")
WALL_S = 60.0
BUILD_S = 300.0
MAX_ROWS = 10_000
# What reading or comparing odd rows may raise: nesting, huge numbers, half characters.
_ODD_ROWS = (ArithmeticError, MemoryError, RecursionError, TypeError, ValueError)
_FINAL_SEMICOLON = Token("operator", ";")
_RETURN, _ORDER = Token("keyword", "RETURN"), Token("keyword", "ORDER")


class Cypher(IsolatedTask):
    """Without a graph, the verdicts are those of ``judge``.

    With one, instead of ``different`` there are: ``wrong_rows``, ``not_executed`` (the engine
    refuses the query, a change of the graph among others), ``timed_out`` (any budget of time or
    memory). Rows are a multiset, ordered only if the reference orders its last RETURN; names of
    columns and the order within lists do not count. A name that the schema does not have is wrong
    whatever comes back. Where the reference does not parse or run here, or where both return
    nothing but nulls, common forms are compared instead.
    """

    name = "cypher"
    metric = "normalised_match"
    fields = frozenset({"schema"})
    artefacts = frozenset({"graph"})
    packages = ("graphglot",)

    def metric_of(self, spec: EvaluationSpec) -> str:
        return "execution_accuracy" if "graph" in spec.artefacts else self.metric

    def unavailable_reason(self, spec: EvaluationSpec) -> str | None:
        missing = [name for name in GRAPH_PACKAGES if importlib.util.find_spec(name) is None]
        if "graph" not in spec.artefacts or not missing:
            return None
        return (
            f"evaluation.artefacts.graph needs {' and '.join(missing)}; "
            "pip install -r envs/requirements-graph.lock, or leave the artefact out"
        )

    def tools(self, spec: EvaluationSpec) -> dict[str, str]:
        packages = GRAPH_PACKAGES if "graph" in spec.artefacts else ()
        return super().tools(spec) | {name: metadata.version(name) for name in packages}

    def texts(self, case: ScoringCase) -> dict[str, str | None]:
        return {"schema": case.optional_text("schema")}

    def score(self, cases: Sequence[ScoringCase]) -> list[Verdict]:
        verdicts = super().score(cases)
        if not cases or "graph" not in cases[0].artefacts:
            return verdicts
        with closing(GraphServer(cases[0].artefacts["graph"])) as server:
            ask = cache(server.ask)
            return [_settle(*each, ask) for each in zip(cases, verdicts, strict=True)]


def judge(prediction: str, reference: str, schema: str | None = None) -> Verdict:
    """Compare two queries by their common form, and say what is wrong with one that differs.

    Kinds, the first that holds: ``correct``, ``empty``, ``did_not_parse``, ``unknown_label``,
    ``unknown_relationship``, ``unknown_property``, ``wrong_direction``, ``different``. ``schema``
    is the text that describes the graph; without it, where it has no known form, and where the
    reference breaks it too, names are not checked.

    A match proves that both return the same rows on every graph, up to names of columns and order
    left open (see ``cypher.forms``). A difference does not prove a wrong answer: nothing is
    executed. So the metric is a lower bound on correct queries. Where the parser gives up or does
    not take the reference, words are compared alone, and ``detail`` says so.

    Raises:
        EvaluationError: the reference is empty or cannot be tokenised.
    """
    wanted, found = _words(reference), _words(prediction)
    if not wanted:
        raise EvaluationError("the reference is empty or no Cypher (an unclosed quote or comment?)")
    if found is None:
        return Verdict("did_not_parse", "a character or an unclosed quote that no query has")
    if not found:
        return Verdict("empty")
    if number_variables(found) == number_variables(wanted):
        return Verdict("correct")
    if not has_closed_brackets(found):  # an answer cut off: the parser would take long over it
        return Verdict("did_not_parse", "a bracket is not closed, or closes none")
    known, read = _reading(reference), _read(prediction)
    if known.fault is not None:
        return Verdict("different", f"words compared alone: of the reference, {known.fault}")
    if read.gave_up:
        return Verdict("different", f"words compared alone: {read.fault}")
    if read.fault is not None:
        return Verdict("did_not_parse", read.fault)
    if common_form(found) == common_form(wanted):
        return Verdict("correct")
    fault = None if schema is None else _name_fault(found, wanted, schema)
    return fault or Verdict("different")


def _name_fault(found: list[Token], wanted: list[Token], text: str) -> Verdict | None:
    schema = read_schema(text)
    if schema is None:
        return Verdict("different", "names not checked: the schema has no known form")
    if (own := NameFaults(wanted, schema).first()) is not None:
        why = f"names not checked: the reference has {own.kind} {own.detail}"
        return Verdict("different", why)
    return NameFaults(found, schema).first()


def _words(query: str) -> list[Token] | None:
    tokens = tokenise(strip_code_fence(query))
    if tokens is None:
        return None
    while tokens and tokens[-1] == _FINAL_SEMICOLON:
        tokens.pop()
    return classify(tokens)


def _read(query: str) -> Reading:
    return read_query(strip_code_fence(query))


# The reference is judged once for each side, and for each checkpoint and baseline.
_reading = lru_cache(maxsize=4096)(_read)


class GraphServer:
    """A process with a graph in memory, started when it is first asked."""

    def __init__(self, script: Path) -> None:
        """Take a file with one Cypher statement a line; lines with ``//`` first are comments."""
        self._script = script
        options = {"script": str(script.resolve())}
        self._worker = Worker(graph_worker.__name__, options, wall_s=WALL_S, quiet=True)
        self.close = self._worker.close

    def ask(self, query: str) -> QueryAnswer:
        """Run one query: ``rows``, ``not_executed`` or ``timed_out``; raise without a graph."""
        builds = not self._worker.is_running
        if builds and not self._script.is_file():
            raise EvaluationError(
                f"the graph {self._script} is not a file; check evaluation.artefacts.graph"
            )
        self._worker.send({"query": query})
        if builds:
            kind, detail = self._worker.receive(BUILD_S)
            if kind != "ready":
                self._worker.close()
                raise EvaluationError(f"the graph {self._script} is not built: {detail}")
        kind, found = self._worker.receive()
        if kind != "rows":
            return QueryAnswer(kind, found)
        if len(found) > MAX_ROWS:
            return QueryAnswer("timed_out", f"more than {MAX_ROWS:,} rows")
        return QueryAnswer("rows", rows=tuple(tuple(map(_cell, row)) for row in found))


def _cell(value: Any) -> Any:
    """Make a value that rows can be sorted by: numbers and text stay, the others become text."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    return f"text {value}" if isinstance(value, str) else f"value {_written(value)}"


def _written(value: Any) -> str:
    """Write a list without its order: what collect() gathers has none."""
    if isinstance(value, list):
        return f"[{','.join(sorted(map(_written, value)))}]"
    return json.dumps(value, sort_keys=True)


def _settle(case: ScoringCase, verdict: Verdict, ask: Callable[[str], QueryAnswer]) -> Verdict:
    # Only what was parsed is run, and only what is not settled without running it.
    if verdict.kind != "different" or verdict.detail.startswith("words compared alone"):
        return verdict
    reference = case.example.reference
    try:
        wanted = ask(_plain(reference))
        if wanted.kind != "rows":
            return Verdict("different", f"not executed: of the reference, {wanted.detail}")
        found = ask(_plain(case.prediction))
        if found.kind != "rows":
            return Verdict(found.kind, found.detail)
        words = _words(reference) or []
        last = max((i for i, word in enumerate(words) if word == _RETURN), default=len(words))
        if not same_rows(wanted.rows, found.rows, ordered=_ORDER in words[last:]):
            return Verdict("wrong_rows", f"{len(found.rows)} rows, wanted {len(wanted.rows)}")
    except _ODD_ROWS as error:
        return Verdict("not_executed", f"its rows cannot be compared: {type(error).__name__}")
    if all(cell is None for row in found.rows for cell in row):
        # A property that does not exist is null too.
        what = "nothing but nulls" if found.rows else "nothing"
        return Verdict("different", f"both return {what}, which tells nothing")
    return Verdict("correct")


def _plain(query: str) -> str:
    return strip_code_fence(query).strip().rstrip("; \t\r\n")
