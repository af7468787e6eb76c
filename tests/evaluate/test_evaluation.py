"""A complete evaluation with fake models."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_up_documents import (
    Letters,
    document,
    example,
    judge_spec,
    packing,
    spec,
    training,
    write_documents,
)
from msgspec import Struct
from msgspec.structs import replace

from expertflow.core.errors import EvaluationError
from expertflow.core.files import sha256_file, sha256_json
from expertflow.core.records import from_json, to_json
from expertflow.data.layout import chatml_layout
from expertflow.evaluate import ask_models as asking
from expertflow.evaluate import evaluation, statistics
from expertflow.evaluate.ask_models import GenerationInputs, ModelEvaluator, ask_models
from expertflow.evaluate.evaluation import EvalInputs, evaluate_expert
from expertflow.evaluate.generate import Answer
from expertflow.evaluate.likelihood import DocumentLosses
from expertflow.evaluate.questions import EvalExample
from expertflow.evaluate.records import (
    EvaluationRecord,
    EvaluationSpec,
    Example,
    GenerationRecord,
    Judgment,
)
from expertflow.evaluate.scoring import judge_answers
from expertflow.evaluate.tasks.exact_match import ExactMatch
from expertflow.tokens.arrow import DOCUMENTS_FILE, ROWS_FILE

N_HELD_OUT, N_TRAINING = 60, 40
END = "\x02"


class Parrot(Struct, weakref=True):
    """A model that answers the first ``skill`` of every ten questions correctly."""

    skill: int

    def answer(self, prompt: str) -> str:
        question = prompt.split("user\n")[1].split(END)[0]
        return question.upper() if int(question.removeprefix("q")) % 10 < self.skill else "dunno"

    def loss(self) -> float:
        return 3.0 - 0.2 * self.skill


def speak(model: Parrot, prompts: list[list[int]], *_: Any) -> list[Answer]:
    texts = [model.answer("".join(map(chr, prompt))) for prompt in prompts]
    return [Answer(text, ended=text != "dunno") for text in texts]


def document_losses(model: Parrot, rows: Any, *, micro_batch_size: int) -> DocumentLosses:
    counts = np.arange(1, N_HELD_OUT + 1)
    return DocumentLosses(counts * model.loss(), counts)


def likelihoods(model: Parrot, pairs: list[Any], **_: Any) -> list[tuple[float, int]]:
    """Assign lower likelihood to references of later questions."""
    numbers = [int("".join(chr(i) for i in prompt if chr(i).isdigit())) for prompt, _ in pairs]
    return [(-model.loss() * (1 + number), 2) for number in numbers]


class Shelf:
    """Loads models, one at a time, and records their names."""

    def __init__(self, skills: dict[str, int]) -> None:
        self.skills = skills
        self.loaded: list[str] = []
        self.lent: Callable[[], Parrot | None] = lambda: None

    def __call__(self, folder: Path | None) -> Parrot:
        assert self.lent() is None, "the model before it is still there"
        name = "base" if folder is None else folder.name
        self.loaded.append(name)
        model = Parrot(self.skills[name])
        self.lent = weakref.ref(model)
        return model


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking.generate, "generate_answers", speak)
    monkeypatch.setattr(asking, "document_losses", document_losses)
    monkeypatch.setattr(asking, "log_likelihoods", likelihoods)
    monkeypatch.setattr(statistics, "N_RESAMPLES", 500)
    # These models have no cycles, and with torch loaded a collection takes a second.
    monkeypatch.setattr(asking.gc, "collect", lambda: None)
    monkeypatch.setattr(asking, "Engine", lambda _: Letters())
    monkeypatch.setattr(asking, "read_rows", lambda _: None)


def made(
    folder: Path, load: Any, *, steps: tuple[int, ...] = (10, 20), n_ids: int = 1000,
    n_groups: int = 1000, **changes: Any,
) -> GenerationInputs:  # fmt: skip
    documents = [document(i, f"q{i:03d}") for i in range(N_HELD_OUT)]
    documents += [document(200 + i, f"q{200 + i}", held_out=False) for i in range(N_TRAINING)]
    shard, keep = write_documents(folder, documents, n_ids=n_ids, n_groups=n_groups)
    rows = folder / "rows" / "held_out" / ROWS_FILE
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_bytes(b"rows")
    packed = packing(N_TRAINING, N_HELD_OUT, held_out_sha256=sha256_file(rows))
    sha256 = sha256_json(["t", packed.held_out.sha256])
    losses = {step: None if step == 10 else 1.0 for step in steps}
    run = training(losses, published=steps[-1], packing_sha256=sha256)
    for candidate in run.candidates:
        place = folder / "checkpoint" / candidate.path
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text("{}")
    plan: Any = SimpleNamespace(
        expert="e", batch_size=1, load_best_model_at_end=False, precision="fp32"
    )
    settings = {"max_examples": 30, "n_selection_examples": 30, "max_new_tokens": 9, **changes}
    return GenerationInputs(
        spec=spec(**settings), shards=[shard], keep=keep, packing=packed, training=run,
        rows=folder / "rows", tokenizer=folder,
        layout=chatml_layout(), checkpoint=folder / "checkpoint", load=load, plan=plan,
    )  # fmt: skip


def evaluate(case: GenerationInputs, **settings: Any) -> EvaluationRecord:
    """Run both jobs; the second reads the first one's output."""
    found = from_json(GenerationRecord, json.loads(json.dumps(to_json(ask_models(case)))))
    return score_answers(case, found, **settings)


def score_answers(
    case: GenerationInputs, generations: GenerationRecord, code: str = "digest", **settings: Any
) -> EvaluationRecord:
    folder = case.rows.parent
    model: Any = SimpleNamespace(tokenizer=SimpleNamespace(layout=case.layout))
    return evaluate_expert(
        EvalInputs(
            spec=EvaluationSpec(**settings), generations=generations, shards=case.shards,
            packing=case.packing, model=model, keep=case.keep,
            state=folder / "state", answers=folder / "answers.jsonl", code=code,
        )
    )  # fmt: skip


def test_an_evaluation_from_questions_to_record(tmp_path: Path) -> None:
    shelf = Shelf({"base": 2, "checkpoint": 5, "step-00000010": 8})
    case = made(tmp_path, shelf)
    record = evaluate(case)
    # Training's choice is evaluated second, so the winner is loaded again.
    assert shelf.loaded == ["base", "step-00000010", "checkpoint", "step-00000010"]
    assert (record.published.step, record.published.path) == (10, "steps/step-00000010")
    assert [c.held_out_loss for c in record.published.candidates] == pytest.approx([1.4, 2.0])
    assert [c.published for c in record.published.candidates] == [True, False]
    before, after = record.before.score, record.after.score
    assert before is not None and after is not None
    assert before.n_examples == after.n_examples == 30 == record.published.n_questions
    assert after.n_correct > before.n_correct
    assert record.before.held_out_loss == pytest.approx(2.6)
    assert record.after.n_documents == N_HELD_OUT
    assert [(change.quantity, change.change) for change in record.changes] == [
        ("exact_match", "better"), ("held_out_loss", "better"),
    ]  # fmt: skip
    assert record.changes[0].difference == pytest.approx((after.n_correct - before.n_correct) / 30)
    assert record.after.n_cut_off == 30 - after.n_correct
    assert record.baselines
    for baseline in record.baselines:
        assert baseline.description.endswith(f"; from {N_TRAINING} training documents")
        assert baseline.change is not None and baseline.score.n_examples == 30
        n_more = after.n_correct - baseline.score.n_correct
        assert baseline.change.difference == pytest.approx(n_more / 30)
    assert record.unavailable.keys() == {"earlier", "judge", "lm_eval"}
    # It survives a round trip, and the same weights again do not count as an earlier run.
    text = json.loads(json.dumps(to_json(record)))
    assert from_json(EvaluationRecord, text) == record
    assert timeless(evaluate(case)) == timeless(record)
    worse = made(tmp_path, Shelf({"base": 2, "checkpoint": 3}), steps=(30,))
    earlier = evaluate(worse).earlier
    assert earlier is not None and earlier.change is not None
    assert (earlier.weights_sha256, earlier.n_shared_questions) == ("w10", 30)
    assert earlier.change.change == "worse"
    # Other code may judge otherwise.
    assert evaluate(worse, code="other").earlier is None


def test_questions_of_a_group_are_drawn_together(tmp_path: Path) -> None:
    case = made(tmp_path, Shelf({"base": 2, "checkpoint": 8}), steps=(20,), n_groups=5)
    free, own = evaluate(case), evaluate(case, grouped_sources=("s",))
    assert [c.change for c in free.changes] == ["better", "better"]
    # Groups of a source are known only for its own questions and documents.
    assert [c.change for c in own.changes] == ["no measurable change"] * 2
    assert free.after.held_out_loss_ci95 is not None
    assert own.after.held_out_loss_ci95 is own.after.perplexity_ci95 is None
    assert own.unavailable["after.held_out_loss_ci95"].startswith("fewer than six")
    assert evaluate(case, grouped_sources=("other",)).changes == free.changes


def test_trained_documents_are_asked_separately_and_rephrased(tmp_path: Path) -> None:
    shelf = Shelf({"base": 0, "checkpoint": 8})
    plain = evaluate(made(tmp_path / "a", shelf, steps=(20,)))
    asked = {"n_recall_examples": 30, "rephrase": "{question}0"}
    record = evaluate(made(tmp_path / "b", shelf, steps=(20,), **asked))
    own, other = record.recall
    assert (own.wording, other.wording) == ("{question}", "{question}0")
    assert own.score.n_examples == other.score.n_examples == 30
    # Eight of ten numbers are known; rephrased, all end in 0, and none is the taught one.
    assert 20 <= own.score.n_correct < 30 and other.score.n_correct == 0
    assert plain.recall == () and timeless(replace(record, recall=())) == timeless(
        replace(plain, answers_path=record.answers_path)
    )


def test_documents_of_the_same_id_keep_their_own_references(tmp_path: Path) -> None:
    shelf, asked = Shelf({"base": 2, "checkpoint": 8}), {"steps": (20,), "n_recall_examples": 30}
    record, other = (
        evaluate(made(tmp_path / str(n_ids), shelf, n_ids=n_ids, **asked)) for n_ids in (1000, 7)
    )
    assert (other.after.score, other.recall) == (record.after.score, record.recall)
    assert other.baselines == record.baselines
    whole, parts = (
        [json.loads(line) for line in Path(one.answers_path).read_text().splitlines()]
        for one in (record, other)
    )
    assert len({line["document_id"] for line in parts}) == 30
    # Repeated ids get a hash suffix, others do not.
    assert all("#" in part.pop("document_id") for part in parts)
    assert not any("#" in line.pop("document_id") for line in whole)
    assert parts == whole


def timeless(record: EvaluationRecord) -> EvaluationRecord:
    return replace(record, wall_s=0.0)


def test_the_worst_are_regressions_then_the_least_likely(tmp_path: Path) -> None:
    shelf = Shelf({"base": 4, "checkpoint": 3})
    case = made(tmp_path, shelf, steps=(20,), max_examples=60)
    record = evaluate(case)
    spoilt = [one.kind_before == "correct" for one in record.worst]
    assert len(record.worst) == 10 and spoilt == [True] * 6 + [False] * 4
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").open()]
    told = {line["document_id"]: line["after_reference_loss"] for line in lines}
    for part in (record.worst[:6], record.worst[6:]):
        losses = [told[one.document_id] for one in part]
        assert losses == sorted(losses, key=lambda loss: -(loss or 0)) and None not in losses
    assert all(one.kind_after != "correct" for one in record.worst)
    assert len(lines) == 60
    assert {"before", "after_kind", "after_detail", "after_reference_loss"} <= lines[0].keys()


def test_without_a_scorer_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is to be generated")

    monkeypatch.setattr(ExactMatch, "unavailable_reason", lambda *_: "Node is missing")
    monkeypatch.setattr(asking.generate, "generate_answers", refuse)
    record = evaluate(made(tmp_path, Shelf({"base": 2, "checkpoint": 9})))
    assert record.after.score is not None
    assert (record.after.score.value_fraction, record.after.score.n_examples) == (None, 0)
    assert record.after.score.reason == "Node is missing"
    assert record.published.path == "." and "Node is missing" in record.published.reason
    assert record.unavailable["baselines"] == "Node is missing"
    assert [change.quantity for change in record.changes] == ["held_out_loss"]
    assert (tmp_path / "answers.jsonl").read_text() == ""


def test_answers_stay_where_they_cannot_be_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scoring machine may differ from the one with the card."""
    shelf = Shelf({"base": 2, "checkpoint": 9})
    case = made(tmp_path, shelf, steps=(20,), n_recall_examples=5)
    generations = ask_models(case)
    assert len(generations.after.texts) == 30
    with monkeypatch.context() as patch:
        patch.setattr(ExactMatch, "unavailable_reason", lambda *_: "Node is missing")
        record = score_answers(case, generations)
    assert record.after.score is not None and record.after.score.reason == "Node is missing"
    parts = ("earlier", "baselines", "recall")
    assert {record.unavailable[part] for part in parts} == {"Node is missing"}
    again = score_answers(case, generations)
    assert again.after.score is not None and again.recall and "recall" not in again.unavailable
    other = replace(generations, document_ids=("s/999",))
    with pytest.raises(EvaluationError, match="s/999: was asked but is not held out"):
        score_answers(case, other)


def test_baselines_may_fail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise EvaluationError("document s/200: the reference is no query")

    monkeypatch.setattr(evaluation, "make_baselines", broken)
    record = evaluate(made(tmp_path, Shelf({"base": 2, "checkpoint": 9}), steps=(20,)))
    assert record.baselines == () and record.after.score is not None
    assert "document s/200" in record.unavailable["baselines"]


def test_a_bad_reference_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf({"base": 2, "checkpoint": 9})
    judged = ExactMatch.judge
    started_with: list[int] = []
    bad = {"s/7", "s/8"}

    def judge(task: ExactMatch, example: Example, answer: str) -> Judgment:
        started_with.append(len(shelf.loaded))
        if example.document_id in bad:
            raise EvaluationError("no number")
        return judged(task, example, answer)

    monkeypatch.setattr(ExactMatch, "judge", judge)
    record = evaluate(made(tmp_path, shelf, steps=(20,), max_examples=60))
    assert started_with[0] == 0, "a model was loaded before references were judged"
    assert record.after.score is not None and record.after.score.n_examples == 58
    assert record.n_unusable_references == 2
    assert "no number" in record.unavailable["n_unusable_references"]
    # Those of training are judged as early.
    bad |= {f"s/{i}" for i in range(N_HELD_OUT, N_HELD_OUT + N_TRAINING)}
    shelf.loaded.clear()
    with pytest.raises(EvaluationError, match=r"^10 of 10 references cannot be judged"):
        evaluate(made(tmp_path, shelf, steps=(20,), n_recall_examples=30))
    assert not shelf.loaded


def test_a_judge_sees_both_answers_if_both_were_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speak_but_once(model: Parrot, prompts: list[list[int]], *more: Any) -> list[Answer]:
        left_out = Answer("", ended=False, not_asked="no position")
        return [left_out, *speak(model, prompts[1:], *more)]

    seen: list[Any] = []
    monkeypatch.setattr(asking.generate, "generate_answers", speak_but_once)
    monkeypatch.setattr(evaluation, "judge_pairs", lambda spec, pairs, *, seed: seen.extend(pairs))
    case = made(tmp_path, Shelf({"base": 0, "checkpoint": 10}), steps=(20,))
    after = evaluate(case, judge=judge_spec()).after
    assert len(seen) == 29 and after.n_cut_off == 0
    assert after.score is not None and after.score.n_by_kind == {"correct": 29, "not_asked": 1}
    assert all(pair.after == pair.example.reference and pair.before == "dunno" for pair in seen)


def test_a_task_without_a_metric_has_losses_in_which_each_document_counts_once(
    tmp_path: Path,
) -> None:
    shelf = Shelf({"base": 2, "checkpoint": 9})
    case = made(tmp_path, shelf, task="held_out_loss")
    pieces = evaluate(case)
    assert shelf.loaded == ["base", "checkpoint"]
    assert pieces.before.score is None and pieces.samples == pieces.worst == ()
    assert "before.score" in pieces.unavailable and "after.n_cut_off" in pieces.unavailable
    np.save(case.rows / "held_out" / DOCUMENTS_FILE, np.arange(N_HELD_OUT) % 5)
    whole = evaluate(case)
    assert (pieces.after.n_documents, whole.after.n_documents) == (N_HELD_OUT, 5)
    assert whole.after.held_out_loss == pytest.approx(pieces.after.held_out_loss)
    (change,) = whole.changes
    assert pieces.changes[0].change == "better"
    assert (change.change, change.n) == ("no measurable change", 5)


def test_a_loss_that_is_not_finite_ends_it_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowed(*_: Any, **__: Any) -> DocumentLosses:
        return DocumentLosses(np.array([1.0, np.nan]), np.array([1, 1]))

    monkeypatch.setattr(asking, "document_losses", overflowed)
    monkeypatch.setattr(asking.generate, "generate_answers", None)
    case = made(tmp_path, Shelf({"base": 2, "checkpoint": 9}), steps=(20,))
    with pytest.raises(EvaluationError, match="the base model's held-out loss is not finite in fp"):
        evaluate(case)


def test_a_choice_not_asked_counts_as_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [Answer("a", ended=True), Answer("", ended=False, not_asked="no position")]
    asked = [EvalExample(example(i, "q", "a", options=["a", "b"], right="a"), [1]) for i in (0, 1)]
    monkeypatch.setattr(asking, "choose_options", lambda *_, **__: answers)
    fields = {"choices": "options", "answer": "right"}
    asks = ModelEvaluator(made(tmp_path, Shelf({"base": 0}), task="multiple_choice", fields=fields))
    found = asks.answer_questions(None, asked)
    assert found.n_cut_off is None and asks.task is not None
    judged = judge_answers(asks.task, [one.example for one in asked], found)
    assert judged == [Judgment("correct"), Judgment("not_asked", "no position")]
