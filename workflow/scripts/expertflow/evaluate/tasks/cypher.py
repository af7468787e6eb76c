"""Judge Cypher by its meaning and, given a graph, by the rows it returns.

Common forms are compared first, in a process with limits, so the parser sees every text before the
graph does. The graph engine is an optional extra (envs/requirements-graph.lock) in another process
(``isolation.graph_worker``), which is killed on a time-out.
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
from expertflow.core.worker import Worker
from expertflow.data.checks.cypher import read_query
from expertflow.evaluate.answer_text import strip_code_fence
from expertflow.evaluate.cypher import tokens as lexer
from expertflow.evaluate.cypher.forms import common_form
from expertflow.evaluate.cypher.schema import find_name_fault, read_schema
from expertflow.evaluate.isolation import graph_worker
from expertflow.evaluate.isolation.rows import QueryAnswer, same_rows
from expertflow.evaluate.records import Example, GenerationSpec, Judgment
from expertflow.evaluate.scoring import IsolatedTask

GRAPH_PACKAGES = ("graphqlite", "apsw")
WALL_S = 60.0
BUILD_S = 300.0
# Raised by odd rows: deep nesting, huge numbers, lone surrogates.
_ODD_ROWS = (ArithmeticError, MemoryError, RecursionError, TypeError, ValueError)
_FINAL_SEMICOLON = lexer.Token("operator", ";")
_RETURN, _ORDER = lexer.Token("keyword", "RETURN"), lexer.Token("keyword", "ORDER")


class Cypher(IsolatedTask):
    """Without a graph, ``judge_texts`` decides.

    With one, ``different`` becomes ``wrong_rows``, ``not_executed`` (refused by the engine, e.g. a
    write to the graph) or ``timed_out`` (any budget of time or memory). Rows are a multiset,
    ordered only if the reference orders its last RETURN; column names and the order within lists do
    not count. A name missing in the schema is wrong whatever the rows. If the reference does not
    parse or run here, or both return nothing but nulls, common forms are compared instead.
    """

    metric = "normalized_match"
    fields = frozenset({"schema"})
    artifacts = frozenset({"graph"})
    packages = ("graphglot",)

    def __init__(self, spec: GenerationSpec) -> None:
        super().__init__(spec)
        self.graph = spec.artifacts.get("graph")
        if self.graph is not None:
            self.metric = "execution_accuracy"

    def unavailable_reason(self) -> str | None:
        missing = [name for name in GRAPH_PACKAGES if importlib.util.find_spec(name) is None]
        if self.graph is None or not missing:
            return None
        return (
            f"evaluation.artifacts.graph needs {' and '.join(missing)}; "
            "pip install -r envs/requirements-graph.lock, or leave the artifact out"
        )

    def tool_versions(self) -> dict[str, str]:
        packages = () if self.graph is None else GRAPH_PACKAGES
        return super().tool_versions() | {name: metadata.version(name) for name in packages}

    def score(self, examples: Sequence[Example], answers: Sequence[str]) -> list[Judgment]:
        judgments = super().score(examples, answers)
        if not examples or self.graph is None:
            return judgments
        with closing(GraphServer(Path(self.graph))) as server:
            ask = cache(server.run_query)
            references = [example.reference for example in examples]
            return [
                _settle(*each, ask) for each in zip(references, answers, judgments, strict=True)
            ]

    @staticmethod
    def judge_texts(answer: str, reference: str, schema: str | None = None) -> Judgment:
        """Compare two queries by their common form, and name the fault of a differing one.

        Kinds, the first that applies: ``correct``, ``empty``, ``did_not_parse``, ``unknown_label``,
        ``unknown_relationship``, ``unknown_property``, ``wrong_direction``, ``different``.
        ``schema`` describes the graph; names are not checked if it is missing, in an unknown
        format, or violated by the reference too.

        A match proves that both return the same rows on every graph, up to column names and order
        left open (see ``cypher.forms``). A difference does not prove an error, so the metric is a
        lower bound. If the parser gives up or rejects the reference, only words are compared, and
        ``detail`` says so. Raises EvaluationError if the reference is empty or cannot be tokenized.
        """
        answer, reference = strip_code_fence(answer), strip_code_fence(reference)
        wanted, found = _words(reference), _words(answer)
        if not wanted:
            raise EvaluationError(
                "the reference is empty or not Cypher (an unclosed quote or comment?)"
            )
        if found is None:
            return Judgment("did_not_parse", "an illegal character or an unclosed quote")
        if not found:
            return Judgment("empty")
        if lexer.number_variables(found) == lexer.number_variables(wanted):
            return Judgment("correct")
        if lexer.group_brackets(found) is None:  # truncated; the parser would take long
            return Judgment("did_not_parse", "unbalanced brackets")
        known, read = _read_once(reference), _read_once(answer)
        if known.fault is not None:
            return Judgment("different", f"only words compared: in the reference, {known.fault}")
        if read.gave_up:
            return Judgment("different", f"only words compared: {read.fault}")
        if read.fault is not None:
            return Judgment("did_not_parse", read.fault)
        if common_form(found) == common_form(wanted):
            return Judgment("correct")
        fault = None if schema is None else _name_fault(found, wanted, schema)
        return fault or Judgment("different")


def _name_fault(found: list[lexer.Token], wanted: list[lexer.Token], text: str) -> Judgment | None:
    schema = read_schema(text)
    if schema is None:
        return Judgment("different", "names not checked: the schema's format is unknown")
    if (own := find_name_fault(wanted, schema)) is not None:
        why = f"names not checked: the reference has {own.kind} {own.detail}"
        return Judgment("different", why)
    return find_name_fault(found, schema)


def _words(query: str) -> list[lexer.Token] | None:
    tokens = lexer.tokenize(query)
    if tokens is None:
        return None
    while tokens and tokens[-1] == _FINAL_SEMICOLON:
        tokens.pop()
    return lexer.classify_words(tokens)


# A reference recurs for each side, checkpoint and baseline, a baseline's answer for each question.
_read_once = lru_cache(maxsize=4096)(read_query)


class GraphServer:
    def __init__(self, script: Path) -> None:
        """Take a file with one Cypher statement per line; ``//`` begins a comment line."""
        self._script = script
        self._worker = Worker(graph_worker.__name__, {}, wall_s=WALL_S, quiet=True)
        self.close = self._worker.close

    def run_query(self, query: str) -> QueryAnswer:
        """Run one query: ``rows``, ``not_executed`` or ``timed_out``; raise without a graph."""
        # Also after a query that was killed: the graph is built again.
        if not self._worker.is_running:
            kind, detail = self._worker.ask({"script": str(self._script.resolve())}, BUILD_S)
            if kind != "ready":
                self._worker.close()
                raise EvaluationError(
                    f"the graph {self._script} cannot be built: {detail}; "
                    "check evaluation.artifacts.graph"
                )
        kind, found = self._worker.ask({"query": query})
        if kind != "rows":
            return QueryAnswer(kind, found)
        return QueryAnswer("rows", rows=tuple(tuple(map(_cell, row)) for row in found))


def _cell(value: Any) -> Any:
    """Return a sortable value: numbers and text unchanged, the others as text."""
    # A bool is an int in Python but not in Cypher.
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    return f"text {value}" if isinstance(value, str) else f"value {_written(value)}"


def _written(value: Any) -> str:
    """Write a list sorted, since what collect() gathers has no order."""
    if isinstance(value, list):
        return f"[{','.join(sorted(map(_written, value)))}]"
    return json.dumps(value, sort_keys=True)


def _settle(
    reference: str, answer: str, judgment: Judgment, ask: Callable[[str], QueryAnswer]
) -> Judgment:
    # Only parsed queries are run, and only if the judgment needs it.
    if judgment.kind != "different" or judgment.detail.startswith("only words compared"):
        return judgment
    try:
        wanted = ask(_plain(reference))
        if wanted.kind != "rows":
            return Judgment("different", f"the reference was not executed: {wanted.detail}")
        found = ask(_plain(answer))
        if found.kind != "rows":
            return Judgment(found.kind, found.detail)
        words = _words(strip_code_fence(reference)) or []
        last = max((i for i, word in enumerate(words) if word == _RETURN), default=len(words))
        if not same_rows(wanted.rows, found.rows, ordered=_ORDER in words[last:]):
            return Judgment("wrong_rows", f"{len(found.rows)} rows, expected {len(wanted.rows)}")
    except _ODD_ROWS as error:
        return Judgment("not_executed", f"its rows cannot be compared: {type(error).__name__}")
    if all(cell is None for row in found.rows for cell in row):
        # A missing property is also null.
        what = "nothing but nulls" if found.rows else "nothing"
        return Judgment("different", f"both return {what}, which proves nothing")
    return Judgment("correct")


def _plain(query: str) -> str:
    return strip_code_fence(query).strip().rstrip("; \t\r\n")
