"""Refuse a report whose evaluation contradicts itself: counts, intervals, words, and the choice."""

from collections.abc import Callable, Iterator
from typing import Any

from expertflow.core.errors import DataError
from expertflow.report.learned import BETTER, LOSSES, NO_CHANGE, WORSE

Report = dict[str, Any]

ROUNDING = 1e-9
LOSS_ROUNDING = 1e-3  # nats: per document and over packed rows, losses are summed in another order
PLACE = "report.json.evaluation"


def check_scores(report: Report) -> None:
    """Make sure that verdicts add up to the answers, and fractions lie inside their intervals.

    Raises:
        DataError: they do not.
    """
    for place, scored in _scored(report["evaluation"]):
        _check_counts(place, scored)
        _check_inside(f"{place}.value_fraction", scored["value_fraction"], scored["ci95"])
    for name in ("before", "after"):
        side = report["evaluation"][name]
        for key in ("held_out_loss", "perplexity"):
            _check_inside(f"{PLACE}.{name}.{key}", side[key], side[f"{key}_ci95"])
        if (side["n_cut_off"] or 0) > (side["n_examples"] or 0):
            raise DataError(f"{PLACE}.{name}.n_cut_off: more than the {side['n_examples']} answers")


def _scored(evaluation: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ("before", "after"):
        yield f"{PLACE}.{name}", evaluation[name]
    for index, baseline in enumerate(evaluation["baselines"]):
        yield f"{PLACE}.baselines[{index}]", baseline
    for index, candidate in enumerate(evaluation["published"]["candidates"]):
        yield f"{PLACE}.published.candidates[{index}]", candidate


def _check_counts(place: str, scored: dict[str, Any]) -> None:
    if scored["value_fraction"] is None:
        return
    n, n_correct, kinds = scored["n_examples"], scored["n_correct"], scored["n_by_kind"]
    if sum(kinds.values()) != n or kinds.get("correct", 0) != n_correct:
        raise DataError(
            f"{place}.n_by_kind: {sum(kinds.values())} verdicts, {kinds.get('correct', 0)} correct;"
            f" {n} answers, {n_correct} correct"
        )
    if not n or abs(scored["value_fraction"] - n_correct / n) > ROUNDING:
        raise DataError(
            f"{place}.value_fraction: {scored['value_fraction']} is not {n_correct} of {n}"
        )


def _check_inside(place: str, value: float | None, ci95: list[float] | None) -> None:
    if value is None or ci95 is None:
        return
    slack = ROUNDING * max(1.0, abs(value))
    if not ci95[0] - slack <= value <= ci95[1] + slack:
        raise DataError(f"{place}: {value} is outside its interval {ci95[0]} to {ci95[1]}")


def check_changes(report: Report) -> None:
    """Make sure that changes are the differences of what stands beside them, in the right word.

    Raises:
        DataError: they are not.
    """
    evaluation = report["evaluation"]
    before, after = evaluation["before"], evaluation["after"]
    for index, change in enumerate(evaluation["changes"]):
        place = f"{PLACE}.changes[{index}]"
        is_loss = change["quantity"] in LOSSES
        key = change["quantity"] if is_loss else "value_fraction"
        _check_difference(place, change, after[key], before[key])
        if not is_loss and change["n"] != after["n_examples"]:
            raise DataError(f"{place}.n: {change['n']}, but {after['n_examples']} were asked")
    for index, baseline in enumerate(evaluation["baselines"]):
        if baseline["change"] is not None:
            place = f"{PLACE}.baselines[{index}].change"
            value = baseline["value_fraction"]
            _check_difference(place, baseline["change"], after["value_fraction"], value)
    if evaluation["earlier"] and evaluation["earlier"]["change"]:
        _check_word(f"{PLACE}.earlier.change", evaluation["earlier"]["change"])


def _check_difference(place: str, change: Report, one: float | None, other: float | None) -> None:
    if one is None or other is None:
        raise DataError(f"{place}: a change of what was not measured")
    slack = LOSS_ROUNDING * max(1.0, one, other) if change["quantity"] in LOSSES else ROUNDING
    if abs(change["difference"] - (one - other)) > slack:
        raise DataError(f"{place}.difference: {change['difference']} is not {one} less {other}")
    _check_word(place, change)


def _check_word(place: str, change: Report) -> None:
    _check_inside(f"{place}.difference", change["difference"], change["ci95"])
    if change["change"] == NO_CHANGE:
        return  # so few pairs may differ that even an interval beside zero proves nothing
    low, high = change["ci95"]
    rose, fell = (WORSE, BETTER) if change["quantity"] in LOSSES else (BETTER, WORSE)
    word = rose if low > 0 else fell if high < 0 else NO_CHANGE
    if change["change"] != word:
        raise DataError(f"{place}.change: {change['change']!r}, the interval says {word!r}")


def check_published(report: Report) -> None:
    """Make sure that the weights that are exported are those that were chosen and evaluated.

    Raises:
        DataError: no candidate or several are marked, or another step is exported.
    """
    published = report["evaluation"]["published"]
    candidates = published["candidates"]
    marked = [candidate["step"] for candidate in candidates if candidate["published"]]
    if candidates and marked != [published["step"]]:
        raise DataError(
            f"{PLACE}.published.candidates: published is step {published['step']}, marked are"
            f" {marked}"
        )
    for index, candidate in enumerate(candidates):
        n = candidate["n_examples"]
        if candidate["value_fraction"] is not None and n != published["n_questions"]:
            raise DataError(
                f"{PLACE}.published.candidates[{index}].n_examples: {n}, not the"
                f" {published['n_questions']} that all were asked"
            )
    if report["export"]["published_step"] != published["step"]:
        raise DataError(
            f"report.json.export.published_step: {report['export']['published_step']}, but step"
            f" {published['step']} was evaluated; run export_model again"
        )


def check_judge(report: Report) -> None:
    """Make sure that a judge's verdicts add up to the pairs, and to its win fraction.

    Raises:
        DataError: they do not.
    """
    judge = report["evaluation"]["judge"]
    if judge is None:
        return
    counted = judge["n_wins"] + judge["n_losses"] + judge["n_ties"]
    if counted + judge["n_failed"] != judge["n_pairs"] or judge["n_inconsistent"] > judge["n_ties"]:
        raise DataError(
            f"{PLACE}.judge: {counted} verdicts ({judge['n_ties']} ties,"
            f" {judge['n_inconsistent']} of them inconsistent) and {judge['n_failed']} failures for"
            f" {judge['n_pairs']} pairs"
        )
    won = (judge["n_wins"] + judge["n_ties"] / 2) / counted if counted else None
    said = judge["win_fraction"]
    if (said is None) != (won is None) or (said is not None and abs(said - won) > ROUNDING):
        raise DataError(f"{PLACE}.judge.win_fraction: {said}, the verdicts say {won}")
    _check_inside(f"{PLACE}.judge.win_fraction", said, judge["ci95"])


EVALUATION_CHECKS: tuple[Callable[[Report], None], ...] = (
    check_scores,
    check_changes,
    check_published,
    check_judge,
)
