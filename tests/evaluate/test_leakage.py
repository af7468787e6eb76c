"""No question was trained on, and the records that prove it are of one run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_documents import document, packed_split, shard, write_documents
from msgspec.structs import replace

from expertflow.core.errors import EvaluationError
from expertflow.core.files import sha256_file, sha256_json
from expertflow.data.documents import Document
from expertflow.data.records import Body, Turn
from expertflow.evaluate import leakage
from expertflow.evaluate.leakage import HeldOutSplit, check_trained_rows, read_split
from expertflow.tokens.arrow import ROWS_FILE

HELD = [document(0, "a"), document(1, "b"), document(2, "c")]


def trained(row: int, question: str, answer: str = "") -> Document:
    return document(row, question, answer, held_out=False)


def packing(n_train: int, n_held_out: int, **changes: Any) -> Any:
    values = {"n_dropped_by_reason": {}, "n_dropped_held_out": 0, **changes}
    return SimpleNamespace(
        train=packed_split(n_train, "t"), held_out=packed_split(n_held_out, "h"), **values
    )


def look(
    folder: Path, documents: list[Document], packed: Any = None, n_copies: int = 1
) -> HeldOutSplit:
    keep = write_documents(folder, documents, n_copies=n_copies)
    n_held = sum(one.held_out for one in documents)
    packed = packed or packing(n_copies * (len(documents) - n_held), n_held)
    return read_split("e", [shard(folder, len(documents))], keep, packing=packed, seed=0)


def test_a_split_without_leaks_is_read(tmp_path: Path) -> None:
    found = look(tmp_path, [*HELD, trained(3, "d"), trained(4, "e")])
    assert [one.document_id for one in found.held_out] == ["s/0", "s/1", "s/2"]
    assert {one.document_id for one in found.training} == {"s/3", "s/4"}
    assert found.n_shared_questions == 0


def test_a_document_on_both_sides_is_refused(tmp_path: Path) -> None:
    """Other fields and blanks do not make documents different."""
    twin = trained(3, " a\n", "A ")
    assert twin.text_hash != HELD[0].text_hash
    with pytest.raises(EvaluationError, match=r"^e: 1 held-out documents are in the training data"):
        look(tmp_path, [*HELD, twin])


def chat(row: int, *said: str, learned: bool = True) -> Document:
    """A training chat; the assistant has every second turn."""
    turns = tuple(
        Turn(role=("user", "assistant")[i % 2], content=text, learned=i % 2 == 1 and learned)
        for i, text in enumerate(said)
    )
    last = Turn(role="assistant", content="the end", learned=True)
    user = Turn(role="user", content="go on", learned=False)
    body = Body(turns=(*turns, user, last))
    return replace(trained(row, f"chat {row}"), body=body)


def test_a_chat_that_goes_on_where_a_held_out_one_ends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"1 held-out documents .* start of a chat"):
        look(tmp_path / "whole", [*HELD, chat(3, "a", " A\n")])
    longer = chat(0, "a", "A", "more", "B")
    held = replace(longer, held_out=True)
    with pytest.raises(EvaluationError, match="1 held-out documents"):
        look(tmp_path / "longer", [held, chat(1, "a", "A", "more", "B", "go on", "the end")])


def test_a_chat_that_answers_otherwise_or_learns_nothing_there_is_not(tmp_path: Path) -> None:
    found = look(tmp_path / "otherwise", [*HELD, chat(3, "a", "Z"), chat(4, "x", "y", "b", "B")])
    assert found.n_shared_questions == 1
    found = look(tmp_path / "given", [*HELD, chat(3, "a", "A", learned=False)])
    assert found.n_shared_questions == 0


def test_a_seeded_sample_of_training_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leakage, "N_TRAINING_EXAMPLES", 5)
    documents = [*HELD, *(trained(i, f"t{i}") for i in range(3, 40))]
    first = look(tmp_path / "one", documents)
    assert len(first.training) == 5
    turned = look(tmp_path / "two", documents[::-1])
    names = [[one.text_hash for one in found.training] for found in (first, turned)]
    assert names[0] == names[1]


@pytest.mark.parametrize(("n_train", "n_held_out"), [(3, 3), (1, 3), (2, 4), (2, 2)])
def test_rows_of_another_split_are_refused(tmp_path: Path, n_train: int, n_held_out: int) -> None:
    documents = [*HELD, trained(3, "d"), trained(4, "e")]
    with pytest.raises(EvaluationError, match="the rows are of another split"):
        look(tmp_path, documents, packing(n_train, n_held_out))


def test_repeats_count_and_what_the_template_dropped_may_be_missing(tmp_path: Path) -> None:
    documents = [*HELD, trained(3, "d"), trained(4, "e")]
    look(tmp_path / "twice", documents, n_copies=2)
    look(tmp_path / "less", documents, packing(1, 3, n_dropped_by_reason={"template": 1}))
    with pytest.raises(EvaluationError, match=r"2 documents for train and packing\.json 3"):
        look(tmp_path / "more", documents, packing(3, 3, n_dropped_by_reason={"template": 1}))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "held_out").mkdir()
    (tmp_path / "held_out" / ROWS_FILE).write_bytes(b"rows")
    return tmp_path


def check(rows: Path, *, told: str | None = None, held_out: str | None = None) -> None:
    own = held_out or sha256_file(rows / "held_out" / ROWS_FILE)
    packed: Any = SimpleNamespace(train=packed_split(1, "t"), held_out=packed_split(1, own))
    training: Any = SimpleNamespace(packing_sha256=told or sha256_json(["t", own]))
    check_trained_rows("e", training=training, packing=packed, rows=rows)


def test_records_of_one_run_belong_together(rows: Path) -> None:
    check(rows)
    with pytest.raises(EvaluationError, match=r"training\.json tells of other rows"):
        check(rows, told="of another run")
    with pytest.raises(EvaluationError, match=r"is missing or not what packing\.json tells of"):
        check(rows, held_out="of other rows")
