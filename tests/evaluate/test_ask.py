"""Which questions are asked, and how they are cut out of documents."""

from itertools import chain
from typing import Any

import pytest
from made_up_documents import Letters, document, spec
from msgspec.structs import replace

from expertflow.core.errors import EvaluationError
from expertflow.data.layout import chatml_layout
from expertflow.data.records import Body
from expertflow.data.render import Renderer
from expertflow.evaluate.ask import Held, choose, cut_at, examples, without_thoughts
from expertflow.evaluate.records import Decoding, EvaluationSpec
from expertflow.tokens.ragged import Ragged, ragged
from expertflow.tokens.tokenize import tokenize

LAYOUT = chatml_layout()
# What some families write before an answer by themselves, and training learns.
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


def asked(how: EvaluationSpec) -> tuple[list[str], list[str]]:
    found = choose(MANY, how, Letters(), LAYOUT)  # type: ignore[arg-type]
    return ids(found.reported), ids(found.selection)


def ids(held: list[Held]) -> list[str]:
    return [one.example.document_id for one in held]


def test_an_answer_ends_before_the_first_stop_text() -> None:
    assert cut_at("a;b\n\nc", ("\n\n", ";")) == "a"
    assert cut_at("abc", ()) == "abc"


def test_a_question_ends_where_training_starts_to_learn() -> None:
    found = choose([document(0, "q", "Q")], spec(), Letters(), LAYOUT)  # type: ignore[arg-type]
    (held,) = found.reported
    assert "".join(map(chr, held.prompt_ids)) == "\x01user\nq\x02\n\x01assistant\n"
    given, follows = held.reference
    assert given == held.prompt_ids and "".join(map(chr, follows)) == "Q\x02"
    assert (held.example.prompt, held.example.reference) == ("q", "Q")


def test_thoughts_are_no_part_of_the_reference() -> None:
    thought = document(0, "q", "<think>hm</think>\nQ")
    found = choose([thought], spec(), Letters(), LAYOUT)  # type: ignore[arg-type]
    assert found.reported[0].example.reference == "Q" == without_thoughts("<think>hm</think>\nQ")
    assert "".join(map(chr, found.reported[0].reference[1])).startswith("<think>")


class Merging(Letters):
    """An engine in which a blank is one token with the letter behind it."""

    def encode_flat(self, texts: list[str]) -> Ragged:
        return ragged([self.encode(text) for text in texts])

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for c in text:
            if ids and ids[-1] == ord(" ") and c.isalpha():
                ids[-1] = 1000 + ord(c)
            else:
                ids.append(ord(c))
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {chr(i - 1000)}" if i > 1000 else chr(i) for i in ids)


def choice(template: str, options: list[str], **changes: Any) -> tuple[Held, Any]:
    layout = replace(LAYOUT, chat_template=template, chat_template_origin="tokenizer")
    one = replace(document(0, "q", options[0]), fields={"options": options})
    how = spec(task="multiple_choice", fields={"choices": "options"}, **changes)
    (held,) = choose([one], how, Merging(), layout).reported  # type: ignore[arg-type]
    return held, tokenize([Renderer(layout).render(one.body)], Merging())


@pytest.mark.parametrize(
    ("template", "given", "follows", "learned"),
    [
        (THINKING, "assistant\n<think>\n\n</think>\n\n", ["D\x02", "ED\x02"],
         "<think>\n\n</think>\n\nD\x02"),
        (BRACKETS, " [/INST]", [" D\n\x02", " ED\n\x02"], " D\n\x02"),
    ],
    ids=["thinking", "brackets"],
)  # fmt: skip
def test_what_is_scored_is_what_training_learns(
    template: str, given: str, follows: list[str], learned: str
) -> None:
    held, trained = choice(template, ["D", "ED"])
    ids, (start, end) = trained.ids.tolist()[0], trained.spans.tolist()[0]
    assert held.reference == (ids[:start], ids[start:end])
    assert Merging().decode(held.reference[1]) == learned
    assert held.reference[0] == held.prompt_ids
    assert list(held.options) == ["D", "ED"]
    for (before, option), wanted in zip(held.options.values(), follows, strict=True):
        assert Merging().decode(before).endswith(given) and Merging().decode(option) == wanted
    # The first option is the reference: both ways of cutting it give the ids of training.
    assert [*chain(*held.options["D"])] == [*chain(*held.reference)]


def test_a_stop_text_that_the_template_writes_before_every_answer_is_refused() -> None:
    with pytest.raises(EvaluationError, match=r"decoding\.stop: .*'\\n\\n' itself") as error:
        choice(THINKING, ["D", "E"], decoding=Decoding(stop=(";", "\n\n")))
    assert "\n" not in str(error.value)
    # What follows an answer, or stands in the question, may end it.
    choice(BRACKETS, ["D", "E"], decoding=Decoding(stop=("\n", "[INST]")))


def test_a_choice_needs_options() -> None:
    with pytest.raises(EvaluationError, match=r"evaluation\.fields\.choices is missing"):
        choose(MANY, spec(task="multiple_choice"), Letters(), LAYOUT)  # type: ignore[arg-type]
    how = spec(task="multiple_choice", fields={"choices": "options"})
    with pytest.raises(EvaluationError, match=r"document s/\d+: options: .*options"):
        choose(MANY, how, Letters(), LAYOUT)  # type: ignore[arg-type]


def test_questions_of_the_choice_are_others_and_change_nothing_reported() -> None:
    alone, none = asked(spec(max_examples=7))
    reported, selection = asked(spec(max_examples=7, n_selection_examples=9))
    assert reported == alone and not none
    assert len(selection) == 9 and not set(selection) & set(reported)
    everything, rest = asked(spec(max_examples=28, n_selection_examples=9))
    assert (len(everything), len(rest)) == (28, 2)


def test_the_order_of_documents_does_not_matter_and_the_seed_does() -> None:
    how = spec(max_examples=9)
    turned = choose(MANY[::-1], how, Letters(), LAYOUT)  # type: ignore[arg-type]
    assert ids(turned.reported) == asked(how)[0]
    assert asked(replace(how, seed=1))[0] != asked(how)[0]


def test_what_asks_nothing_is_left_out() -> None:
    plain = replace(MANY[0], body=Body(text="only a text"))
    refusing = replace(LAYOUT, text_special_tokens="reject")
    special = document(1, "<|im_end|>")
    found = examples([plain, special, MANY[2]], refusing)
    assert [example.document_id for example in found] == ["s/2"]
