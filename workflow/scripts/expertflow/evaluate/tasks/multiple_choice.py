"""Parse the options of a multiple-choice question, and judge which one was chosen."""

from typing import Any

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.records import Example, Judgment
from expertflow.evaluate.scoring import ScoringTask, name_document

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class MultipleChoice(ScoringTask):
    """Judge the option that a prediction names, by its text or its label.

    Kinds: ``correct``, ``wrong_choice``, ``no_choice``. Options with equal text count as one.
    """

    metric = "choice_accuracy"
    fields = frozenset({"choices", "answer"})
    required = ("fields.choices", "fields.answer")

    is_choice = True

    def judge(self, example: Example, answer: str) -> Judgment:
        options = read_options(self.read_field(example, "choices"))
        wanted = right_label(options, self.read_field(example, "answer"))
        # If texts are the options, one may look like another's label, as "2" does.
        listed = {} if self.list_options(example) == list(options) else options
        # Reversed, so that the first of equal texts wins.
        by_text = {_folded(text): label for label, text in reversed(listed.items())}
        try:
            chosen = by_text.get(_folded(answer)) or right_label(options, answer.strip())
        except EvaluationError:
            return Judgment("no_choice", _folded(answer)[:80])
        if chosen == wanted or _folded(options[chosen]) == _folded(options[wanted]):
            return Judgment("correct")
        return Judgment("wrong_choice", f"chose {chosen}, expected {wanted}")

    def list_options(self, example: Example) -> list[str]:
        """Return the options as the data words them: labels if the reference is one, else texts."""
        choices = self.read_field(example, "choices")
        with name_document(example):
            try:
                options = read_options(choices)
            except EvaluationError as error:
                raise EvaluationError(f"{self.spec.fields['choices']}: {error}") from error
        reference, texts = example.reference.strip(), list(options.values())
        return list(options) if reference in options and reference not in texts else texts


def read_options(choices: Any) -> dict[str, str]:
    """Return the options' texts by label, in the record's order.

    Accepts a list of texts (labeled A, B, …), a mapping of labels to texts, and two lists of equal
    length, ``{"label": […], "text": […]}``. Raises EvaluationError for anything else, or fewer than
    two options.
    """
    if isinstance(choices, dict) and isinstance(choices.get("text"), list):
        labels, texts = choices.get("label"), choices["text"]
        if not isinstance(labels, list) or len(labels) != len(texts):
            raise EvaluationError("the options' label and text should be lists of equal length")
        choices = dict(zip(map(str, labels), texts, strict=True))
        if len(choices) < len(texts):
            raise EvaluationError(f"two options share a label ({', '.join(map(str, labels)):.60})")
    elif isinstance(choices, list):
        if len(choices) > len(LETTERS):
            raise EvaluationError(
                f"{len(choices)} options are more than the {len(LETTERS)} supported"
            )
        choices = dict(zip(LETTERS, choices, strict=False))
    if not isinstance(choices, dict) or not all(isinstance(t, str) for t in choices.values()):
        raise EvaluationError(
            f"options should be a list of texts or a mapping of labels to texts, "
            f"found {choices!r:.60}"
        )
    if len(choices) < 2:
        raise EvaluationError(f"a choice needs two options or more, found {len(choices)}")
    return choices


def right_label(options: dict[str, str], answer: Any) -> str:
    """Return the label of the right option, given its label, index from 0, or text.

    A text that is a label is read as one; among equal texts the first counts. If labels are
    integers, an integer is a label and never an index. Raises EvaluationError if none matches.
    """
    labels = list(options)
    index = answer if isinstance(answer, int) and not isinstance(answer, bool) else None
    whole = [x for x in labels if x.isascii() and x.removeprefix("-").isdigit()]
    if index is not None and whole:
        if str(index) in options:
            return str(index)
        # An index in some records and a label in others would judge by chance.
        raise EvaluationError(
            f"the answer {answer!r:.60} is not one of the labels ({', '.join(labels):.60}); with "
            "numeric labels it is not an index; correct it or evaluation.fields.answer"
        )
    if isinstance(answer, str):
        if answer in options:
            return answer
        by_text = [label for label, text in options.items() if _folded(text) == _folded(answer)]
        if by_text:
            return by_text[0]
    elif index is not None and 0 <= index < len(labels):
        return labels[index]
    raise EvaluationError(
        f"the answer {answer!r:.60} is not one of the options ({', '.join(labels)}); "
        "use a label, an index from 0, or an option's text"
    )


def _folded(text: str) -> str:
    return " ".join(text.split())
