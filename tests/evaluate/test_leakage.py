"""No question was trained on, and the records that prove it belong to one run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_documents import document, packing, write_documents
from msgspec.structs import replace

from expertflow.core.errors import EvaluationError
from expertflow.core.files import sha256_file, sha256_json
from expertflow.data.documents import Document
from expertflow.data.records import Body, Turn
from expertflow.evaluate import leakage
from expertflow.evaluate.leakage import HeldOutSplit, check_trained_rows, read_split
from expertflow.tokens.arrow import ROWS_FILE


def trained(row: int, question: str, answer: str = "") -> Document:
    return document(row, question, answer, held_out=False)


HELD = [document(0, "a"), document(1, "b"), document(2, "c")]
BOTH = [*HELD, trained(3, "d"), trained(4, "e")]


def look(
    folder: Path, documents: list[Document], packed: Any = None, n_copies: int = 1
) -> HeldOutSplit:
    shard, keep = write_documents(folder, documents, n_copies=n_copies)
    n_held = sum(one.held_out for one in documents)
    packed = packed or packing(n_copies * (len(documents) - n_held), n_held)
    return read_split("e", [shard], keep, packing=packed, seed=0)


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


def test_a_held_out_document_that_was_trained_on_is_rejected(tmp_path: Path) -> None:
    # Other fields and whitespace do not make documents different.
    twin = trained(3, " a\n", "A ")
    goes_on = chat(3, "a", " A\n")
    said = ("a", "A", "more", "B")
    chats = [replace(chat(0, *said), held_out=True), chat(1, *said, "go on", "the end")]
    tools = [replace(x, body=replace(x.body, tools=({"name": "look_up"},))) for x in chats]
    words = (
        r"^e: 1 held-out documents are also in the training data, in full or as the start of a chat"
    )
    for i, documents in enumerate(([*HELD, twin], [*HELD, goes_on], chats, tools)):
        with pytest.raises(EvaluationError, match=words):
            look(tmp_path / str(i), documents)


def test_a_split_without_leaks_is_read(tmp_path: Path) -> None:
    otherwise = [chat(3, "a", "Z"), chat(4, "x", "y", "b", "B")]
    unlearned = [chat(3, "a", "A", learned=False)]
    for n_shared, training in ((0, BOTH[3:]), (1, otherwise), (0, unlearned)):
        found = look(tmp_path / str(len(training)) / str(n_shared), [*HELD, *training])
        assert [one.document_id for one in found.held_out] == ["s/0", "s/1", "s/2"]
        assert {one.row for one in found.training} == {one.row for one in training}
        assert found.n_shared_questions == n_shared


def test_a_seeded_sample_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leakage, "N_TRAINING_EXAMPLES", 5)
    documents = [*HELD, *(trained(i, f"t{i}") for i in range(3, 40))]
    both = (look(tmp_path / "one", documents), look(tmp_path / "two", documents[::-1]))
    names = [[one.text_hash for one in found.training] for found in both]
    assert names[0] == names[1] and len(names[0]) == 5


def test_rows_of_another_split_are_rejected(tmp_path: Path) -> None:
    for n_train, n_held_out in ((3, 3), (1, 3), (2, 4), (2, 2)):
        with pytest.raises(EvaluationError, match="the rows are from a different split"):
            look(tmp_path / f"{n_train}{n_held_out}", BOTH, packing(n_train, n_held_out))
    # Repeats count, and what the template dropped may be missing.
    dropped = {"n_dropped_by_reason": {"template": 1}}
    look(tmp_path / "twice", BOTH, n_copies=2)
    look(tmp_path / "less", BOTH, packing(1, 3, **dropped))
    with pytest.raises(EvaluationError, match=r"2 documents for train but packing\.json lists 3"):
        look(tmp_path / "more", BOTH, packing(3, 3, **dropped))


def test_records_of_one_run_belong_together(tmp_path: Path) -> None:
    rows = tmp_path / "held_out" / ROWS_FILE
    rows.parent.mkdir()
    rows.write_bytes(b"rows")
    own = sha256_file(rows)

    def check(trained: str, packed: str) -> None:
        training: Any = SimpleNamespace(packing_sha256=sha256_json(["t", trained]))
        held_out = packing(1, 1, held_out_sha256=packed)
        check_trained_rows("e", training=training, packing=held_out, rows=tmp_path)

    check(own, own)
    with pytest.raises(
        EvaluationError, match=r"training\.json and packing\.json describe different rows"
    ):
        check("others", own)
    with pytest.raises(EvaluationError, match=r"missing, or not the rows in packing\.json"):
        check("others", "others")
