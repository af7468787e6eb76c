"""Choosing questions, cutting them from documents, and replacing bad references."""

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_up_documents import Letters, document, example, spec, write_documents
from msgspec.structs import replace

from expertflow.core.errors import EvaluationError
from expertflow.data.documents import Document
from expertflow.data.layout import chatml_layout
from expertflow.data.records import Body, Layout
from expertflow.data.render import Renderer
from expertflow.evaluate import lm_eval_tasks, questions
from expertflow.evaluate.leakage import key_by_seed
from expertflow.evaluate.questions import (
    EvalExample,
    Questions,
    check_references,
    choose_questions,
    find_unusable,
    make_examples,
)
from expertflow.evaluate.records import Decoding, Example, Judgment, LmEvalSpec
from expertflow.evaluate.tasks.multiple_choice import MultipleChoice
from expertflow.tokens.ragged import Ragged
from expertflow.tokens.tokenize import tokenize

LAYOUT = chatml_layout()
# Some families' templates write this before an answer, and training learns it.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}\n<|im_end|>{% endif %}{% endfor %}"
)
MANY = [document(i, f"question {i}") for i in range(30)]
CHOICE: Any = {"task": "multiple_choice", "fields": {"choices": "options"}}


class Task(MultipleChoice):
    """Rejects references that contain "bad"; counts its starts."""

    n_starts = 0

    def score(self, examples: Sequence[Example], answers: Sequence[str]) -> list[Judgment]:
        self.n_starts += 1
        for one in examples:
            if one.reference == "bad":
                raise EvaluationError(f"document {one.document_id}: no number")
        return [Judgment("correct") for _ in answers]

    def list_options(self, example: Example) -> list[str]:
        return super().list_options(example) if self.spec.task == "multiple_choice" else []


def choose(
    documents: list[Document] = MANY, layout: Layout = LAYOUT, scorer: Any = None, **settings: Any
) -> Questions:
    asked, engine = spec(**settings), cast(Any, Merging())
    return choose_questions(documents, asked, scorer or Task(asked), engine=engine, layout=layout)


def ids(held: list[EvalExample]) -> list[str]:
    return [one.example.document_id for one in held]


def test_a_question_ends_where_training_starts_to_learn() -> None:
    (held,) = choose([document(0, "q", "<think>hm</think>\nQ")]).reported
    assert "".join(map(chr, held.prompt_ids)) == "\x01user\nq\x02\n\x01assistant\n"
    given, follows = held.reference
    assert given == held.prompt_ids
    assert "".join(map(chr, follows)) == "<think>hm</think>\nQ\x02"
    # Thoughts are not part of the reference.
    assert (held.example.prompt, held.example.reference) == ("q", "Q")


def test_thoughts_opened_by_the_template_are_not_part_of_the_reference() -> None:
    opens = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}<think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    layout = replace(LAYOUT, chat_template=opens, chat_template_origin="tokenizer")
    (held,) = choose([document(0, "q", "hm</think>\nQ")], layout).reported
    assert "".join(map(chr, held.prompt_ids)).endswith("assistant\n<think>\n")
    assert held.example.reference == "Q"


def test_questions_that_a_template_rejects_take_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    layout = replace(LAYOUT, chat_template="nothing", chat_template_origin="tokenizer")
    assert not choose(MANY, layout).reported
    assert len(caplog.messages) == 2 and "is not asked: chat_template" in caplog.messages[0]
    assert caplog.messages[1] == f"nor are {len(MANY) - 1} others"


class Merging(Letters):
    """An engine that merges a space with the following letter."""

    def encode_flat(self, texts: list[str]) -> Ragged:
        merged = (re.sub(r" ([a-zA-Z])", lambda m: chr(1000 + ord(m[1])), text) for text in texts)
        return Ragged.from_lists([[ord(c) for c in text] for text in merged])

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {chr(i - 1000)}" if i > 1000 else chr(i) for i in ids)


def choice(template: str, options: list[str], **changes: Any) -> tuple[EvalExample, Any]:
    layout = replace(LAYOUT, chat_template=template, chat_template_origin="tokenizer")
    one = replace(document(0, "q", options[0]), fields={"options": options})
    (held,) = choose([one], layout, **CHOICE, **changes).reported
    return held, tokenize([Renderer(layout).render(one.body)], Merging())


def test_what_is_scored_is_what_training_learns() -> None:
    thought = "<think>\n\n</think>\n\n"
    for template, given, follows, learned in (
        (THINKING, f"assistant\n{thought}", ["D\x02", "ED\x02"], f"{thought}D\x02"),
        (BRACKETS, " [/INST]", [" D\n\x02", " ED\n\x02"], " D\n\x02"),
    ):
        held, trained = choice(template, ["D", "ED"])
        ids, (start, end) = trained.ids.tolist()[0], trained.spans.tolist()[0]
        assert held.reference == (ids[:start], ids[start:end])
        assert Merging().decode(held.reference[1]) == learned
        assert held.reference[0] == held.prompt_ids
        assert list(held.options) == ["D", "ED"]
        for (before, option), wanted in zip(held.options.values(), follows, strict=True):
            assert Merging().decode(before).endswith(given) and Merging().decode(option) == wanted
        # The first option is the reference: both splits yield training's ids.
        assert [*chain(*held.options["D"])] == [*chain(*held.reference)]


def test_a_stop_text_that_the_template_writes_before_every_answer_is_rejected() -> None:
    with pytest.raises(EvaluationError, match=r"decoding\.stop: .*itself writes '\\n\\n'") as error:
        choice(THINKING, ["D", "E"], decoding=Decoding(stop=(";", "\n\n")))
    assert "\n" not in str(error.value)
    # Text after an answer, or in the question, may be a stop text.
    choice(BRACKETS, ["D", "E"], decoding=Decoding(stop=("\n", "[INST]")))


def test_a_choice_needs_options() -> None:
    with pytest.raises(EvaluationError, match=r"evaluation\.fields\.choices is missing"):
        choose(task="multiple_choice")
    with pytest.raises(EvaluationError, match=r"document s/\d+: options: .*options"):
        choose(**CHOICE)


def test_selection_questions_are_separate_and_change_nothing_reported() -> None:
    alone = choose(max_examples=7)
    both = choose(max_examples=7, n_selection_examples=9)
    assert both.reported == alone.reported and not alone.selection
    # The order of documents does not matter, and the seed does.
    turned, other = choose(MANY[::-1], max_examples=7), choose(max_examples=7, seed=1)
    assert turned.reported == alone.reported != other.reported
    assert len(both.selection) == 9 and not set(ids(both.selection)) & set(ids(both.reported))
    every = choose(max_examples=28, n_selection_examples=9)
    assert (len(every.reported), len(every.selection)) == (28, 2)


def test_documents_without_a_question_are_left_out() -> None:
    plain = replace(MANY[0], body=Body(text="only a text"))
    refusing = replace(LAYOUT, text_special_tokens="reject")
    special = document(1, "<|im_end|>")
    found = make_examples([plain, special, MANY[2]], refusing)
    assert [example.document_id for example in found] == ["s/2"]


def test_each_bad_reference_is_named_with_few_starts() -> None:
    task = Task(spec())
    asked = [example(i, "q", "bad" if i in (3, 4, 90) else "good") for i in range(100)]
    assert find_unusable(asked, task.score) == {i: f"document d{i}: no number" for i in (3, 4, 90)}
    assert task.n_starts < 50


def test_the_next_questions_replace_bad_ones_in_order() -> None:
    documents = [document(i, f"q{i}", "" if i % 10 else "bad") for i in range(60)]
    ordered = sorted(documents, key=key_by_seed(0))
    expected = [one.document_id for one in ordered if one.row % 10][:24]
    found = choose(documents, max_examples=20, n_selection_examples=4)
    assert ids([*found.reported, *found.selection]) == expected
    last = [one.document_id for one in ordered].index(expected[-1])
    assert len(found.unusable) == last + 1 - 24 > 0
    assert found.unusable[0].endswith("no number")


def test_few_bad_references_are_tolerated_and_many_are_an_error() -> None:
    for n_bad, n, max_examples, message in (
        (2, 4, 4, None),
        (2, 2, 4, "2 of 2 references"),
        (8, 40, 99, None),
        (9, 40, 99, r"cannot be judged by evaluation\.task exact_match"),
        # If none of the first can be judged, no more are tried.
        (500, 500, 400, "10 of 10 references"),
    ):
        documents = [document(i, f"q{i}", "bad" if i < n_bad else "") for i in range(n)]
        task = Task(spec())
        if message is None:
            assert len(choose(documents, scorer=task, max_examples=max_examples).unusable) == n_bad
            continue
        with pytest.raises(EvaluationError, match=message):
            choose(documents, scorer=task, max_examples=max_examples)
        assert n < 500 or task.n_starts < 20


def test_references_are_checked_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer: Any = SimpleNamespace(path="", layout=LAYOUT)
    monkeypatch.setattr(questions, "Engine", lambda _: Merging())

    def checked(n_bad: int, **settings: Any) -> Any:
        documents = [document(i, f"q{i}", "-" if i < n_bad else "#### 7") for i in range(20)]
        documents += [document(i, f"q{i}", "-", held_out=False) for i in range(20, 25)]
        shard, keep = write_documents(tmp_path, documents)
        asked = spec(max_examples=20, **settings)
        return check_references(
            expert="e", spec=asked, shards=[shard], keep=keep, tokenizer=tokenizer
        )

    found = checked(3, task="final_answer")
    assert (found["n_questions"], len(found["unusable"])) == (17, 3)
    (warning,) = caplog.messages
    assert warning.startswith("3 of 20 references cannot be judged and are not asked")
    assert "correct them" in warning and warning.endswith("or use the task exact_match")
    with pytest.raises(EvaluationError, match=r"^10 of 10 references cannot be judged"):
        checked(20, task="final_answer")
    # So are those of documents trained on, and the names of lm-eval tasks.
    with pytest.raises(EvaluationError, match=r"^5 of 5 references .* The first: document s/2"):
        checked(0, task="final_answer", n_recall_examples=9)
    (tmp_path / "x.yaml").touch()
    with pytest.raises(EvaluationError, match=r"x\.yaml: has no line 'task: x'"):
        checked(0, lm_eval=LmEvalSpec(tasks=(f"{tmp_path}/x.yaml",), n_shots=0, limit=None))
    monkeypatch.setattr(lm_eval_tasks, "unavailable_reason", lambda: "it is not installed")
    checked(0, lm_eval=LmEvalSpec(tasks=("one",), n_shots=0, limit=None))
    assert caplog.messages[-1] == "e: evaluation.lm_eval: it is not installed"
    # Another machine may have what is missing here.
    found = checked(0, task="typescript_tests")
    assert found["n_questions"] == 0 and found["unavailable_reason"]
    assert "are not checked here" in caplog.messages[-1]
    assert checked(20, task="held_out_loss")["n_questions"] == 0
