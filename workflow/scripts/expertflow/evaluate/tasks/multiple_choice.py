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
    try:
        if isinstance(choices, list):
            labels, texts = list(LETTERS[: len(choices)]), choices
        elif isinstance(choices.get("text"), list):
            labels, texts = list(map(str, choices["label"])), choices["text"]
        else:
            labels, texts = list(choices), list(choices.values())
        options = dict(zip(labels, texts, strict=True))
    except (AttributeError, LookupError, TypeError, ValueError):
        labels, options = [], {}
    is_text = all(isinstance(text, str) for text in options.values())
    if len(options) < max(2, len(labels)) or not is_text:
        raise EvaluationError(
            f"options should be two texts or more: a list of at most {len(LETTERS)}, a mapping of"
            " distinct labels to texts, or lists label and text of equal length; "
            f"found {choices!r:.60}"
        )
    return options


def right_label(options: dict[str, str], answer: Any) -> str:
    """Return the label of the right option, given its label, index from 0, or text.

    A text that is a label is read as one; among equal texts the first counts. If labels are
    integers, an integer is a label and never an index. Raises EvaluationError if none matches.
    """
    labels = list(options)
    if isinstance(answer, int) and not isinstance(answer, bool):
        if str(answer) in options:
            return str(answer)
        # An index in some records and a label in others would judge by chance.
        has_numbers = any(x.isascii() and x.removeprefix("-").isdigit() for x in labels)
        if 0 <= answer < len(labels) and not has_numbers:
            return labels[answer]
    elif isinstance(answer, str):
        if answer in options:
            return answer
        by_text = [label for label, text in options.items() if _folded(text) == _folded(answer)]
        if by_text:
            return by_text[0]
    raise EvaluationError(
        f"the answer {answer!r:.60} is not one of the options ({', '.join(labels):.60}); "
        "use a label, an option's text, or if no label is a number an index from 0; correct it or"
        " evaluation.fields.answer"
    )


def _folded(text: str) -> str:
    return " ".join(text.split())
