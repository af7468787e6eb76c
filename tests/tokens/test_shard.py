"""Tokenizing a shard's documents, and the reasons for dropped ones."""

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import document_shard, pair, tiny_tokenizer, tokenizer_record
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from expertflow.core.files import sha256_file
from expertflow.data.layout import CHATML, chatml_layout
from expertflow.data.records import Body, Segment, ShardRecord, ToolCall, Turn
from expertflow.data.reject import Reject
from expertflow.data.render import DocumentForm, Renderer
from expertflow.tokens.arrow import from_arrow_lists, read_index
from expertflow.tokens.engine import Engine
from expertflow.tokens.ragged import Ragged, offsets_of
from expertflow.tokens.records import TokenShardRecord, TokenSpec
from expertflow.tokens.shard import pretokenize_shard
from expertflow.tokens.store import ABANDONED_S, ensure_stored, find_prunable, publish_file
from expertflow.tokens.tokenize import tokenize

TEMPLATES = {
    "known": CHATML,
    "own": CHATML + "{# not the one that is known #}",
    "trims": CHATML.replace("message.content }}", "message.content | trim }}"),
    "asks": CHATML.replace(
        "message.content }}", "('x' if '…' in message.content else message.content) }}"
    ),
    "thinks": CHATML.replace(
        r"'\n' + message.content }}",
        r"'\n' + ('<think>\n\n</think>\n\n' if message.role == 'assistant' and loop.last"
        " and '</think>' not in message.content else '') + message.content }}",
    ),
    "opaque": CHATML.replace("message.content }}", "(message.content ~ '') }}"),
}
SPEC = TokenSpec(engine="tokenizers", versions={})
# Whether a text has a special token; why the document was dropped; its ids and learned spans.
Document = tuple[bool, str | None, list[int], list[int]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def engine(tokenizer: Path) -> Engine:
    return Engine(tokenizer)


def pretokenize(
    folder: Path, tokenizer: Path, *shards: ShardRecord, spec: TokenSpec = SPEC, **more: Any
) -> TokenShardRecord:
    """Tokenize some shards into a folder; ``more`` is added to the tokenizer's record."""
    name = shards[0].shard
    sha256 = sha256_file(tokenizer / "tokenizer.json")
    return pretokenize_shard(
        name=name, spec=spec, code="c", shards=shards,
        tokenizer=tokenizer_record(path=str(tokenizer), sha256=sha256, **more),
        store=folder / "store", ids=folder / f"{name}.ids", index=folder / f"{name}.arrow",
    )  # fmt: skip


def read_documents(record: TokenShardRecord) -> list[Document]:
    index = read_index(Path(record.index_path))
    ids = Ragged(np.fromfile(record.path, "<i4"), offsets_of(index["n_tokens"].to_numpy()))
    spans = from_arrow_lists(index["spans"]).tolist()
    flags = (index[name].to_pylist() for name in ("special_text", "dropped"))
    return list(zip(*flags, ids.tolist(), spans, strict=True))


def tokenize_alone(body: Body, renderer: Renderer, engine: Engine) -> Document:
    segments, dropped = (), None
    try:
        segments = renderer.render(body)
    except Reject as reject:
        dropped = reject.reason
    tokens = tokenize([segments], engine)
    has_special = renderer.has_special_text(body)
    return has_special, dropped, tokens.ids[0].tolist(), tokens.spans[0].tolist()


def mixed_bodies() -> list[Body]:
    rng = random.Random(3)
    words = ["ask", "tell", "", "a  b", "<|im_end|>", "\nx", "<tool>", "é\n", "…", "0 1"]
    bodies = []
    for i in range(200):
        text = " ".join(rng.choices(words, k=3)).strip()
        if i % 5 == 0:
            bodies.append(Body(text=text or "x"))
            continue
        roles = rng.choice([["user", "assistant"], ["system", "user", "assistant", "user"]])
        learned = rng.choice([("assistant",), ("assistant", "user", "system"), ("user",)])
        call = (ToolCall(name="find", arguments={"a": i % 3}),) if i % 31 == 0 else ()
        turns = []
        for j, role in enumerate(roles):
            content = rng.choice(words) + text if j else text
            calls = call if role == "assistant" else ()
            turns.append(
                Turn(role=role, content=content, learned=role in learned, tool_calls=calls)
            )
        bodies.append(Body(turns=tuple(turns)))
    return bodies


@pytest.mark.parametrize("policy", ["plain", "reject", "allow"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_columns_equal_each_document_alone(
    tmp_path: Path, tokenizer: Path, engine: Engine, policy: Any, template: str
) -> None:
    layout = replace(chatml_layout(), chat_template=TEMPLATES[template], added_tokens=("<tool>",))
    layout = replace(layout, text_special_tokens=policy)
    bodies = mixed_bodies()
    record = pretokenize(tmp_path, tokenizer, document_shard(tmp_path, bodies), layout=layout)
    renderer = Renderer(layout)
    assert read_documents(record) == [tokenize_alone(body, renderer, engine) for body in bodies]
    assert record.n_dropped < 200
    if template in ("known", "own"):
        assert (record.n_dropped > 0) == (policy == "reject")


def test_samples_show_documents_with_what_is_learned(tmp_path: Path, tokenizer: Path) -> None:
    bodies = [pair(f"ask {i}") for i in range(20)]
    samples = pretokenize(tmp_path, tokenizer, document_shard(tmp_path, bodies)).samples
    assert [row for row, _ in samples] == list(range(8))
    sample = samples[1][1]
    assert sample.document_id == "s/1"
    assert [(p.text, p.learned) for p in sample.pieces] == [
        ("<|im_start|>user\nask 1<|im_end|>\n<|im_start|>assistant\n", False),
        ("tell<|im_end|>", True),
        ("\n", False),
    ]
    assert sample.n_supervised_tokens < sample.n_tokens


def test_the_files_contain_every_document(tmp_path: Path, tokenizer: Path, engine: Engine) -> None:
    each, n_times = mixed_bodies(), 24
    bodies = each * n_times
    shards = [
        document_shard(tmp_path, bodies[:2500]),
        document_shard(tmp_path, bodies[2500:], shard="001"),
    ]
    record = pretokenize(tmp_path, tokenizer, *shards)
    assert (record.n_documents, record.document_shards) == (4800, ("000", "001"))
    assert record.n_documents_by_shard == (2500, 2300)
    documents = read_documents(record)
    assert record.n_tokens == sum(len(ids) for _, _, ids, _ in documents)
    renderer = Renderer(chatml_layout())
    expected = [tokenize_alone(body, renderer, engine) for body in each]
    assert documents == expected * n_times


def test_a_form_that_differs_is_not_used(
    tmp_path: Path, tokenizer: Path, engine: Engine,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    bodies = [pair(f"ask {i}") for i in range(20)]
    real = Renderer.build_form

    def wrong(self: Renderer, frame: bytes) -> DocumentForm | None:
        form = real(self, frame)
        return form and form._replace(items=form.items[:-1])

    monkeypatch.setattr(Renderer, "build_form", wrong)
    record = pretokenize(tmp_path, tokenizer, document_shard(tmp_path, bodies))
    renderer = Renderer(chatml_layout())
    assert read_documents(record) == [tokenize_alone(body, renderer, engine) for body in bodies]
    assert "applied to each document" in caplog.text


def test_damaged_tokens_are_remade(tmp_path: Path, tokenizer: Path) -> None:
    shard = document_shard(tmp_path, [pair("ask")] * 9)
    record = pretokenize(tmp_path, tokenizer, shard)
    whole = Path(record.path).read_bytes()
    with Path(record.path).open("r+b") as stream:
        stream.truncate(8)
    assert pretokenize(tmp_path, tokenizer, shard) == record
    assert Path(record.path).read_bytes() == whole


def fill(folder: Path) -> None:
    (folder / "ids").write_bytes(b"123")


def test_a_failure_leaves_nothing_and_the_first_of_two_is_used(tmp_path: Path) -> None:
    def failing(folder: Path) -> None:
        fill(folder)
        raise ValueError

    with pytest.raises(ValueError):
        ensure_stored(tmp_path, "k", failing, Path.is_dir)
    assert list(tmp_path.iterdir()) == []

    def slow(folder: Path) -> None:
        fill(folder)
        other = tmp_path / "k"
        other.mkdir()
        (other / "ids").write_bytes(b"first")

    folder, _ = ensure_stored(tmp_path, "k", slow, Path.is_dir)
    assert (folder / "ids").read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_result_shares_the_bytes_and_outlives_the_store(tmp_path: Path) -> None:
    folder, _ = ensure_stored(tmp_path / "store", "k", fill, Path.is_dir)
    result = tmp_path / "results" / "a.ids"
    # Recently stored files may be about to be linked.
    assert find_prunable(tmp_path / "store") == []
    for _ in range(2):
        publish_file(folder / "ids", result)
        assert result.stat().st_ino == (folder / "ids").stat().st_ino
    old = time.time() - ABANDONED_S - 1
    for path in (folder / "ids", folder):
        os.utime(path, (old, old))
    assert find_prunable(tmp_path / "store") == []
    result.unlink()
    assert find_prunable(tmp_path / "store") == [folder]


def ids_and_spans(document: Sequence[Segment], engine: Engine) -> tuple[list[int], list[int]]:
    tokens = tokenize([document], engine)
    return tokens.ids[0].tolist(), tokens.spans[0].tolist()


def test_supervision_may_start_and_end_inside_a_text(engine: Engine) -> None:
    def learned(text: str, *spans: tuple[int, int]) -> list[str]:
        ids, edges = ids_and_spans([Segment(text, learned=spans)], engine)
        return [engine.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    text = "user\nlist all names and SELECT name FROM users"
    start, end = text.index(" all"), text.index(" and")
    assert learned(text, (start, end), (len(text) - 6, len(text))) == [" all names", " users"]
    # A token that merges across an edge is the first one after it.
    assert len(engine.encode_flat(["assistant"])[0]) == 1
    assert learned("assistant", (4, 9)) == ["assistant"]
    assert len(tokenize([], engine).ids) == 0


def test_a_space_is_added_only_before_the_first_word(tmp_path: Path) -> None:
    # Like some families.
    words = {word: i for i, word in enumerate(["<s>", "\u2581", "a", "b", "\u2581a", "[unk]"])}
    tokenizer = Tokenizer(models.BPE(words, [("\u2581", "a")], unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    engine, mark = Engine(tmp_path), Segment("<s>", special=True)
    ids, _ = ids_and_spans([mark, Segment("ab"), mark], engine)
    assert ids == engine.encode_with_special_tokens("<s>ab<s>") == [0, 2, 3, 0]
    assert engine.encode_flat(["<s>"]).tolist() != [[0]]
