import json
from typing import Any

import pytest
from made_up_model import END, PAD, Pairs, prompts, tiny_qwen3
from support import SHARED_DATA

from expertflow.evaluate.ask import Held
from expertflow.evaluate.likelihood import choose_options, log_likelihoods
from expertflow.evaluate.options import wordings
from expertflow.evaluate.records import Example
from expertflow.evaluate.tasks import score

FIELDS = {"choices": "options", "answer": "correct"}
ENGINE = Pairs()
AQUA = SHARED_DATA / "phase1c-cot" / "aqua" / "records.jsonl"


def held(
    prompt: list[int], options: list[str], correct: Any, reference: str, engine: Any = ENGINE
) -> Held:
    fields = {"options": options, "correct": correct}
    example = Example(document_id="d", prompt="q", reference=reference, fields=fields)
    ids = engine.encode_flat(options).tolist()
    pairs = {text: (prompt, [*own, END]) for text, own in zip(options, ids, strict=True)}
    return Held(example, prompt, options=pairs)


def choose(asked: list[Held], batch_size: int = 3, n_positions: int = 512) -> list[str]:
    model = tiny_qwen3(n_positions=n_positions)
    found = choose_options(model, asked, pad_id=PAD, batch_size=batch_size)
    assert all(answer.hindrance is None for answer in found)
    return [answer.text for answer in found]


def test_the_option_most_likely_a_token_is_chosen() -> None:
    options = ["CaDaEaFa", "Ga", "GaHa", "Ib"]
    asked = [held(prompt, options, "A", options[0]) for prompt in prompts(3, 5, 8, 2, 6)]
    found = choose(asked)
    for question, chosen in zip(asked, found, strict=True):
        ids = [*ENGINE.encode_flat(options).tolist()]
        pairs = [(question.prompt_ids, [*option, END]) for option in ids]
        likely = log_likelihoods(tiny_qwen3(), pairs, pad_id=PAD, batch_size=1)
        means = [nats / n for nats, n in likely]
        assert chosen == options[means.index(max(means))]
    assert len(set(found)) > 1
    assert choose(asked, batch_size=20) == found


def test_a_choice_is_judged_as_a_prediction() -> None:
    asked = [held(prompts(3)[0], ["Ga", "Ha"], "B", "Ha")]
    chosen = choose(asked)
    examples = [question.example for question in asked]
    verdict = score(
        "multiple_choice", examples=examples, predictions=chosen, fields=FIELDS, artefacts={}
    )[0]
    assert verdict.kind == ("correct" if chosen == ["Ha"] else "wrong_choice")


def test_labels_are_compared_where_the_data_answers_by_labels() -> None:
    fields = {"options": {"Aa": "Ga", "Ba": "Ha"}}
    for reference, wanted in (
        (" Ba\n", ["Aa", "Ba"]), ("Ha", ["Ga", "Ha"]), ("The answer is Ha", ["Ga", "Ha"])
    ):  # fmt: skip
        example = Example(document_id="d", prompt="q", reference=reference, fields=fields)
        assert wordings(example, "options") == wanted


def test_questions_may_have_different_numbers_of_options() -> None:
    asked = [
        held(prompts(4)[0], ["Ga", "Ha"], 0, "Ga"),
        held(prompts(6)[0], ["Ga", "Ha", "Ia", "Ja"], 3, "Ja"),
    ]
    assert choose(asked) == [choose(asked[:1])[0], choose(asked[1:])[0]]


@pytest.mark.parametrize("options", [["GaHaIaJa", "Ga"], ["GaHaIa", "HaIaGa"]])
def test_a_question_with_an_option_that_has_no_position_is_not_asked(options: list[str]) -> None:
    long, short = (held(prompt, options, 0, options[0]) for prompt in prompts(6, 2))
    found = choose_options(
        tiny_qwen3(n_positions=8), [long, short], pad_id=PAD, batch_size=2
    )  # fmt: skip
    assert found[0].text == "" and "positions" in (found[0].hindrance or "")
    assert [found[1].text] == choose([short])


class Bytes(Pairs):
    """An engine that spells, folded into the model's few tokens."""

    def encode_flat(self, texts: list[str]) -> Any:
        from expertflow.tokens.ragged import ragged

        return ragged([[2 + byte % 58 for byte in text.encode()] for text in texts])


@pytest.mark.skipif(not AQUA.is_file(), reason=f"{AQUA.name} of AQuA is not on this machine")
def test_real_questions_are_answered_with_one_of_their_options() -> None:
    with AQUA.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line, _ in zip(lines, range(20), strict=False)]
    prompt = Bytes().encode_flat([record["question"] for record in records]).tolist()
    asked = [
        held(ids[:200], record["options"], record["correct"], record["rationale"], Bytes())
        for ids, record in zip(prompt, records, strict=True)
    ]
    chosen = choose(asked, batch_size=8)
    assert all(c in r["options"] for c, r in zip(chosen, records, strict=True))
    right = [next(o for o in r["options"] if o.startswith(r["correct"])) for r in records]
    for predictions, n_correct in ((right, 20), (chosen, None)):
        verdicts = score(
            "multiple_choice", examples=[q.example for q in asked], predictions=predictions,
            fields=FIELDS, artefacts={},
        )  # fmt: skip
        kinds = {verdict.kind for verdict in verdicts}
        assert kinds <= {"correct", "wrong_choice"}
        assert n_correct is None or sum(v.correct for v in verdicts) == n_correct
