"""What is retokenized, and what is not, for an expert with two sources and a tokenizer."""

from pathlib import Path
from typing import Any

import pytest
from workflow_space import Workspace, make_workspace, manifest

from expertflow.core.records import read_record
from expertflow.tokens.records import PackingRecord, TokenShardRecord
from expertflow.tokens.tokenizer import save_tokenizer, train_tokenizer

pytestmark = pytest.mark.chain
PACKING = "results/tiny/packing.json"


def two_sources(*n_shards: int, **training: Any) -> dict[str, Any]:
    value = manifest(**training) | {"tokenizer": "data/tokenizer"}
    (sums,) = value["sources"]
    value["sources"].append({**sums, "name": "more", "path": "data/more.jsonl"})
    for source, n in zip(value["sources"], n_shards or (2, 3), strict=True):
        source["n_shards"] = n
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


SELECT = {"deduplicate_documents": 1, "pack_sequences": 1}
TOKENIZE = {"pretokenize_shard": 2, "pack_sequences": 1}
PACK = {"pack_sequences": 1}


@pytest.mark.parametrize(
    ("block", "setting", "jobs"),
    [
        ("training", {"max_seq_length": 96}, PACK),
        ("data", {"eval_fraction": 0.2}, SELECT),
        ("data", {"token_engine": "tokenizers"}, TOKENIZE),
    ],
)
def test_a_setting_tokenizes_what_it_must(
    space: Workspace, block: str, setting: dict[str, Any], jobs: dict[str, int]
) -> None:
    value = two_sources()
    value[block] |= setting
    space.write_manifest("tiny", value)
    assert space.jobs(PACKING) == jobs
    if jobs == TOKENIZE:
        before = read_record(PackingRecord, space.root / PACKING)
        space.run(PACKING)
        after = read_record(PackingRecord, space.root / PACKING)
        engines = [engine.split()[0] for record in (before, after) for engine in record.engines]
        assert engines == ["fastokens", "tokenizers"]
        assert before.train.sha256 == after.train.sha256


def test_editing_one_source_tokenizes_one_source(space: Workspace) -> None:
    write_more(space, n=31)
    assert space.jobs(PACKING) == SELECT | {
        "fetch_source": 1, "prepare_shard": 3, "pretokenize_shard": 1,
    }  # fmt: skip


def tokens_of(space: Workspace, shard: str) -> TokenShardRecord:
    return read_record(TokenShardRecord, space.root / f"results/tiny/tokens/{shard}.json")


def test_a_reverted_edit_finds_its_tokens(space: Workspace) -> None:
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


def test_another_expert_shares_the_tokens(space: Workspace) -> None:
    space.write_manifest("other", two_sources(max_seq_length=96))
    space.run("results/other/packing.json")
    stored = list((space.root / "state" / ".tokens").glob("*/tokens.ids"))
    assert len(stored) == 2
    ids = space.root / "results/other/tokens/sums/000.ids"
    assert any(ids.samefile(path) for path in stored)
    assert ids.read_bytes() == (space.root / "results/tiny/tokens/sums/000.ids").read_bytes()
