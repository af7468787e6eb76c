"""Judge Cypher by what it asks; ``graph.rows`` goes on where there is a graph to ask."""

from functools import lru_cache

from expertflow.core.errors import EvaluationError
from expertflow.data.checks.cypher import Reading, read_query
from expertflow.evaluate.cypher.forms import common_form
from expertflow.evaluate.cypher.names import find_name_fault
from expertflow.evaluate.cypher.paths import has_closed_brackets
from expertflow.evaluate.cypher.schema import read_schema
from expertflow.evaluate.cypher.tokens import Token, classify, number_variables, tokenise
from expertflow.evaluate.records import Verdict, wrong_verdict
from expertflow.evaluate.text import strip_code_fence

_FINAL_SEMICOLON = Token("operator", ";")
_RETURN, _ORDER = Token("keyword", "RETURN"), Token("keyword", "ORDER")


def judge_cypher(prediction: str, reference: str, schema: str | None = None) -> Verdict:
    """Compare two queries by their common form, and say what is wrong with one that differs.

    Kinds, the first that holds: ``correct``, ``empty``, ``did_not_parse``, ``unknown_label``,
    ``unknown_relationship``, ``unknown_property``, ``wrong_direction``, ``different``. ``schema``
    is the text that describes the graph; without it, where it has no known form, and where the
    reference breaks it too, names are not checked.

    A match proves that both return the same rows on every graph, up to names of columns and order
    left open (see ``cypher_forms``). A difference does not prove a wrong answer: nothing is
    executed. So the metric is a lower bound on correct queries. Where the parser gives up or does
    not take the reference, words are compared alone, and ``detail`` says so.

    Raises:
        EvaluationError: the reference is empty or cannot be tokenised.
    """
    wanted, found = _words(reference), _words(prediction)
    if not wanted:
        raise EvaluationError("the reference is empty or no Cypher (an unclosed quote or comment?)")
    if found is None:
        return wrong_verdict("did_not_parse", "a character or an unclosed quote that no query has")
    if not found:
        return wrong_verdict("empty")
    if number_variables(found) == number_variables(wanted):
        return Verdict(correct=True, kind="correct")
    if not has_closed_brackets(found):  # an answer cut off: the parser would take long over it
        return wrong_verdict("did_not_parse", "a bracket is not closed, or closes none")
    known, read = _reading(reference), _read(prediction)
    if known.fault is not None:
        return wrong_verdict("different", f"words compared alone: of the reference, {known.fault}")
    if read.gave_up:
        return wrong_verdict("different", f"words compared alone: {read.fault}")
    if read.fault is not None:
        return wrong_verdict("did_not_parse", read.fault)
    if common_form(found) == common_form(wanted):
        return Verdict(correct=True, kind="correct")
    return _name_fault(found, wanted, schema) or wrong_verdict("different")


def orders_rows(query: str) -> bool:
    """Say whether ORDER stands behind the last RETURN."""
    words = _words(query) or []
    last = max((i for i, word in enumerate(words) if word == _RETURN), default=len(words))
    return _ORDER in words[last:]


def _name_fault(found: list[Token], wanted: list[Token], text: str | None) -> Verdict | None:
    if text is None:
        return None
    schema = read_schema(text)
    if schema is None:
        return wrong_verdict("different", "names not checked: the schema has no known form")
    if (own := find_name_fault(wanted, schema)) is not None:
        return wrong_verdict(
            "different", f"names not checked: the reference has {own.kind} {own.detail}"
        )
    fault = find_name_fault(found, schema)
    return None if fault is None else wrong_verdict(fault.kind, fault.detail)


def _words(query: str) -> list[Token] | None:
    """Name the words of a query without its fence and final semicolons."""
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
