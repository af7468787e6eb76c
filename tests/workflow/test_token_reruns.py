"""What is tokenized again, and what is not, for an expert with two sources and a tokenizer."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from workflow_space import Workspace, make_workspace, manifest

from expertflow.core.records import read_record
from expertflow.tokens.records import PackingRecord, TokenShardRecord
from expertflow.tokens.tokenizer import save_tokenizer, train_tokenizer

pytestmark = pytest.mark.chain
PACKING = "results/tiny/packing.json"


def two_sources(**training: Any) -> dict[str, Any]:
    value = manifest(**training)
    sums = value["sources"][0]
    value["sources"] = [
        {**sums, "n_shards": 2},
        {**sums, "name": "more", "path": "data/more.jsonl", "n_shards": 3},
    ]
    value["tokenizer"] = "data/tokenizer"
    return value


def write_more(space: Workspace, *, n: int = 30) -> None:
    lines = [f'{{"question": "twice {i}", "answer": "{2 * i}"}}\n' for i in range(n)]
    (space.root / "data" / "more.jsonl").write_text("".join(lines))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    space = make_workspace(tmp_path_factory.mktemp("packed") / "space")
    (space.root / "data" / "tokenizer").mkdir()
    texts = ["user\nwhat is 1 plus 2", "assistant\ntwice 3"] * 9
    save_tokenizer(train_tokenizer(texts, vocab_size=300), space.root / "data" / "tokenizer")
    write_more(space)
    space.write_manifest("tiny", two_sources())
    space.run(PACKING)
    return space


@pytest.fixture
def space(packed: Workspace, tmp_path: Path) -> Workspace:
    return packed.copy(tmp_path / "space")


def test_editing_one_source_tokenizes_one_source(space: Workspace) -> None:
    write_more(space, n=31)
    assert space.jobs(PACKING) == {
        "fetch_source": 1, "prepare_shard": 3, "pretokenize_shard": 1, "deduplicate_documents": 1,
        "pack_sequences": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "training", [{"max_seq_length": 96}, {"packing": "concat"}, {"overflow": "drop"}, {"seed": 7}]
)
def test_another_packing_tokenizes_nothing(space: Workspace, training: dict[str, Any]) -> None:
    space.write_manifest("tiny", two_sources(**training))
    assert space.jobs(PACKING) == {"pack_sequences": 1}


@pytest.mark.parametrize("data", [{"eval_fraction": 0.2}, {"max_documents": 40}])
def test_another_split_tokenizes_nothing(space: Workspace, data: dict[str, Any]) -> None:
    value = two_sources()
    value["data"] |= data
    space.write_manifest("tiny", value)
    assert space.jobs(PACKING) == {"deduplicate_documents": 1, "pack_sequences": 1}


def test_another_engine_tokenizes_all(space: Workspace) -> None:
    value = two_sources()
    value["data"]["token_engine"] = "tokenizers"
    space.write_manifest("tiny", value)
    assert space.jobs(PACKING) == {"pretokenize_shard": 2, "pack_sequences": 1}
    before = read_record(PackingRecord, space.root / PACKING)
    space.run(PACKING)
    after = read_record(PackingRecord, space.root / PACKING)
    assert [{engine.split()[0] for engine in r.engines} for r in (before, after)] == [
        {"fastokens"}, {"tokenizers"},
    ]  # fmt: skip
    assert before.train.sha256 == after.train.sha256


def tokens_of(space: Workspace, shard: str) -> TokenShardRecord:
    return read_record(TokenShardRecord, space.root / f"results/tiny/tokens/{shard}.json")


def test_an_edit_taken_back_finds_its_tokens(space: Workspace) -> None:
    first = tokens_of(space, "more/000")
    stored = set((space.root / "state" / ".tokens").iterdir())
    write_more(space, n=60)
    space.run(PACKING)
    assert tokens_of(space, "more/000").key != first.key
    made = set((space.root / "state" / ".tokens").iterdir()) - stored
    assert len(made) == 1
    write_more(space)
    space.run(PACKING)
    assert tokens_of(space, "more/000") == first
    assert set((space.root / "state" / ".tokens").iterdir()) == stored | made
    log = space.root / "results/tiny/logs/pretokenize_shard.more.000.log"
    assert "taken from the store" in log.read_text()


def test_rows_are_the_same_for_any_number_of_shards_and_threads(space: Workspace) -> None:
    before = read_record(PackingRecord, space.root / PACKING)
    value = two_sources()
    for source, n_shards in zip(value["sources"], (5, 20), strict=True):
        source["n_shards"] = n_shards
    space.write_manifest("tiny", value)
    shutil.rmtree(space.root / "state" / ".tokens")
    space.run("--set-threads", "pretokenize_shard=1", "--", PACKING)
    after = read_record(PackingRecord, space.root / PACKING)
    assert after.train.sha256 == before.train.sha256
    assert after.held_out.sha256 == before.held_out.sha256
    assert len(list((space.root / "results/tiny/tokens/more").glob("*.ids"))) == 2


def test_another_expert_shares_the_tokens(space: Workspace) -> None:
    space.write_manifest("other", two_sources(max_seq_length=96))
    space.run("results/other/packing.json")
    stored = list((space.root / "state" / ".tokens").glob("*/tokens.ids"))
    assert len(stored) == 2
    ids = space.root / "results/other/tokens/sums/000.ids"
    assert any(ids.samefile(path) for path in stored)
    assert ids.read_bytes() == (space.root / "results/tiny/tokens/sums/000.ids").read_bytes()
