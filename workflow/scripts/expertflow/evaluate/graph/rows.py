"""Judge Cypher by what a graph gives, where its form does not settle it.

Forms are judged first, in a process with limits: the parser meets every text before the graph does.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from expertflow.core.records import Record
from expertflow.evaluate.cypher.scorer import orders_rows
from expertflow.evaluate.graph.engine import GraphAnswer, GraphServer, same_answer
from expertflow.evaluate.judging import Judged, judge_apart
from expertflow.evaluate.records import Verdict, wrong_verdict
from expertflow.evaluate.text import strip_code_fence

# What reading or comparing odd rows may raise: nesting, huge numbers, half characters.
_ODD_ROWS = (ArithmeticError, MemoryError, RecursionError, TypeError, ValueError)

Ask = Callable[[str], GraphAnswer]


class CypherPair(Record, frozen=True, kw_only=True):
    """A predicted query, its reference, and the text of the schema if there is one."""

    prediction: str
    reference: str
    schema: str | None = None
    document_id: str = ""


def judge_by_rows(pairs: Iterable[CypherPair], graph: Path) -> list[Verdict]:
    """Judge queries by the rows that a graph gives, in the order of the pairs.

    The kinds are those of ``judge_cypher``, and instead of ``different``: ``wrong_rows``,
    ``not_executed`` (the engine refuses the query, a change of the graph among others),
    ``timed_out`` (any budget of time or memory). Rows are a multiset, ordered only if the
    reference orders its last RETURN; names of columns and the order within lists do not count. A
    name that the schema does not have is wrong whatever comes back. Where the reference does not
    parse or run here, or where both return nothing but nulls, common forms are compared instead.

    Raises:
        EvaluationError: the graph cannot be built, or a reference is no query.
    """
    pairs = list(pairs)
    verdicts = judge_apart("cypher", [_judged(pair) for pair in pairs])
    with GraphServer(graph) as server:
        known: dict[str, GraphAnswer] = {}

        def ask(query: str) -> GraphAnswer:
            if query not in known:
                known[query] = server.ask(query)
            return known[query]

        return [_settle(*each, ask) for each in zip(pairs, verdicts, strict=True)]


def _judged(pair: CypherPair) -> Judged:
    return Judged(
        document_id=pair.document_id,
        prediction=pair.prediction,
        texts={"reference": pair.reference, "schema": pair.schema},
    )


def _settle(pair: CypherPair, verdict: Verdict, ask: Ask) -> Verdict:
    # Only what was parsed is run, and only what is not settled without running it.
    if verdict.kind != "different" or verdict.detail.startswith("words compared alone"):
        return verdict
    try:
        return _compare(pair, ask)
    except _ODD_ROWS as error:
        return wrong_verdict("not_executed", f"its rows cannot be compared: {type(error).__name__}")


def _compare(pair: CypherPair, ask: Ask) -> Verdict:
    wanted = ask(_plain(pair.reference))
    if wanted.kind != "rows":
        return wrong_verdict("different", f"not executed: of the reference, {wanted.detail}")
    found = ask(_plain(pair.prediction))
    if found.kind != "rows":
        return wrong_verdict(found.kind, found.detail)
    if not same_answer(wanted, found, ordered=orders_rows(pair.reference)):
        return wrong_verdict("wrong_rows", f"{len(found.rows)} rows, wanted {len(wanted.rows)}")
    if all(cell is None for row in found.rows for cell in row):
        # A property that does not exist is null too.
        what = "nothing but nulls" if found.rows else "nothing"
        return wrong_verdict("different", f"both return {what}, which tells nothing")
    return Verdict(correct=True, kind="correct")


def _plain(query: str) -> str:
    return strip_code_fence(query).strip().rstrip("; \t\r\n")
