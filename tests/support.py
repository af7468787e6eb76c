"""Shared helpers: paths, and a tiny run to train."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from expertflow.core.files import sha256_file
from expertflow.core.records import write_record
from expertflow.data.layout import chatml_layout
from expertflow.data.records import Body, ShardRecord, Turn
from expertflow.plan.draft import PlanDraft
from expertflow.plan.records import ModelFacts, PlanSpec
from expertflow.plan.resolve import plan_training
from expertflow.plan.settings import LoraSpec, Training
from expertflow.staging.content import read_content
from expertflow.staging.ensure import plan_staging
from expertflow.staging.records import StageSpec
from expertflow.tokens.arrow import INDEX, PackedRows, index_batch
from expertflow.tokens.ragged import Ragged
from expertflow.tokens.records import PackingSpec, TokenizerRecord, TokenShardRecord

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "workflow" / "scripts"
SHARED_DATA = ROOT.parent / "shared" / "data"
# A timeout for hangs, also on a slow machine; mutants.py has less.
PATIENCE_S = float(os.environ.get("EXPERTFLOW_PATIENCE_S", "900"))
# Of Qwen3-0.6B.
QWEN3_CONFIG = {
    "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
    "tie_word_embeddings": True, "model_type": "qwen3",
}  # fmt: skip


def wait_for(
    what: Callable[[], object], *, message: str = "", during: "subprocess.Popen[Any] | None" = None
) -> None:
    """Wait until a condition holds, while the process that would cause it keeps running."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline_s, message or "waited too long"
        assert during is None or during.poll() is None, message or "its process ended"
        time.sleep(0.01)


def is_running(process: psutil.Process | int) -> bool:
    """Return whether a process is running; an ended one may not be collected yet."""
    try:
        if isinstance(process, int):
            process = psutil.Process(process)
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def running_in(folder: Path) -> list[psutil.Process]:
    """List the processes whose working directory is a folder or below it.

    That is known from their start on; their program and environment are not.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder) and is_running(process):
                found.append(process)
        except psutil.Error:
            continue
    return found


def flip_byte(path: Path) -> None:
    """Change one byte in the middle of a file, keeping its links."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def run_script(name: str, *words: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a script of the workflow to completion."""
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *map(str, words)]
    given = {"capture_output": True, "text": True, "timeout": PATIENCE_S, **settings}
    return subprocess.run(command, **given)


def tiny_inputs(folder: Path, *names: str) -> list[object]:
    """Return the arguments of a script that reads a tiny run's records and rows."""
    records = [word for name in names for word in (f"--{name}", folder / f"{name}.json")]
    return [*records, "--rows", folder / "packed"]


def patched_script(folder: Path, name: str, code: str) -> Path:
    """Write one of our scripts that runs some code first."""
    path, program = folder / f"patched_{name}.py", str(SCRIPTS / f"{name}.py")
    before = f"import sys\nfrom pathlib import Path\nsys.path.insert(0, {str(SCRIPTS)!r})\n"
    after = (
        f"sys.argv[0] = {program!r}\nexec(compile(Path({program!r}).read_text(), 'it', 'exec'))\n"
    )
    path.write_text(f"{before}{code}\n{after}")
    return path


def plan_spec(**changes: Any) -> PlanSpec:
    """Return training settings for a test, with changes."""
    settings: dict[str, Any] = {
        "method": "full", "lora": None, "batch_size": 4, "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3, "dataloader_prefetch_factor": 2, "save_steps": 5,
        "logging_steps": 5, "n_threads": 1, "collection_interval_seconds": 0.5, "seed": 1,
        "hardware": "cpu", "gpu_table": (), "prices": {}, "price_usd_per_hour": None,
        "price_as_of": None, "billing_minutes": None, "system": None, "claims": (), "compare": (),
    }  # fmt: skip
    origins = dict.fromkeys(Training.__struct_fields__, "manifest")
    return PlanSpec(**{**settings, "origins": origins, **changes})


LORA = LoraSpec(
    r=4, alpha=8, dropout=0.1, targets=("q_proj", "v_proj"), use_dora=False, use_rslora=False
)


def token_shard(
    folder: Path, documents: list[list[int]], *, shard: str = "000"
) -> TokenShardRecord:
    """Write a token shard with documents supervised from their third token on."""
    tokens = Ragged.from_lists(documents)
    spans = Ragged.from_lists([[2, len(d)] if len(d) > 2 else [] for d in documents])
    ids, index = folder / f"{shard}.ids", folder / f"{shard}.arrow"
    ids.write_bytes(tokens.values.astype("<i4").tobytes())
    n = len(documents)
    with pa.OSFile(str(index), "wb") as sink, pa.ipc.new_stream(sink, INDEX) as writer:
        writer.write_batch(index_batch(tokens.lengths, spans, [False] * n, [None] * n))
    return TokenShardRecord(
        source="s", shard=shard, document_shards=(shard,), n_documents_by_shard=(n,),
        path=str(ids), index_path=str(index), key="", n_documents=n,
        n_tokens=len(tokens.values), n_dropped=0, dropped_examples=(), samples=(),
        engine="tokenizers", engine_version="0", engine_reason="a test", tokenizer_sha256="",
    )  # fmt: skip


def made_up_rows(n_rows: int, length: int, *, seed: int = 0, n_documents: int = 4) -> PackedRows:
    """Make rows of up to this many documents, with arbitrary supervised parts."""
    rng = np.random.default_rng(seed)
    lengths, spans = [], []
    for _ in range(n_rows):
        cuts = rng.choice(np.arange(1, length + 1), rng.integers(1, n_documents + 1), replace=False)
        lengths.append(np.diff(np.sort(cuts), prepend=0).tolist())
        edges = rng.choice(np.arange(cuts.max() + 1), 2 * rng.integers(0, 3), replace=True)
        spans.append(np.sort(edges).tolist())
    ids = rng.integers(0, 97, (n_rows, length)).astype(np.int32)
    return PackedRows.from_lists(ids, lengths, spans)


def packing_spec(**changes: Any) -> PackingSpec:
    """Return packing settings for a test, with changes."""
    settings = {
        "sequence_length_tokens": 64, "packing": "bfd", "overflow": "split",
        "seed": 0, "max_rejected_fraction": 0.01,
    }  # fmt: skip
    return PackingSpec(**{**settings, **changes})


def tokenizer_record(**changes: Any) -> TokenizerRecord:
    """Return the record of a tokenizer with ChatML's tokens."""
    settings = {"path": "t", "sha256": "t", "vocab_size": 97, "layout": chatml_layout()}
    return TokenizerRecord(**{**settings, **changes})


def document_shard(
    folder: Path, bodies: list[Body], *, shard: str = "000", n_ids: int = 1 << 30,
    n_groups: int = 1 << 30,
) -> ShardRecord:  # fmt: skip
    """Write a shard of documents; their ids and groups repeat after this many."""
    from expertflow.data.documents import DocumentWriter, NewDocument
    from expertflow.data.shapes import frame_of

    path = folder / f"{shard}.documents.arrow"
    with pa.OSFile(str(path), "wb") as sink:
        writer = DocumentWriter(sink, None)
        for i, body in enumerate(bodies):
            text_hash = hashlib.md5(repr(body).encode()).digest()
            name, group = f"s/{i % n_ids}", i % n_groups
            writer.add(NewDocument(name, text_hash, group, None, *frame_of(body), b"{}"))
        writer.close()
    return ShardRecord(
        source="s", shard=shard, path=str(path), sha256=sha256_file(path), n_records=len(bodies),
        n_documents=len(bodies), n_rejected_by_reason={}, n_filtered_by_reason={},
        rejected_examples=(),
    )  # fmt: skip


def tiny_tokenizer(folder: Path) -> Path:
    """Train a tokenizer with little more than bytes."""
    from expertflow.tokens.tokenizer import save_tokenizer, train_tokenizer

    texts = ["user\nask", "assistant\ntell"] * 9
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(train_tokenizer(texts, vocab_size=300), folder)
    return folder


def keep_list(folder: Path, held_out: dict[str, list[bool]], *, n_copies: int = 1) -> Path:
    """Keep all documents of some shards, marking the held-out ones."""
    from expertflow.data.documents import KEEP

    path = folder / "keep.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, KEEP) as writer:
        for shard, held in held_out.items():
            n = len(held)
            columns = {
                "source": ["s"] * n, "shard": [shard] * n, "row": list(range(n)),
                "held_out": held, "n_copies": [1 if one else n_copies for one in held],
            }  # fmt: skip
            writer.write_batch(pa.RecordBatch.from_pydict(columns, schema=KEEP))
    return path


def turn(role: str, content: str = "", *, learned: bool | None = None, **more: Any) -> Turn:
    """Make a turn; by default it is learned if it is the assistant's."""
    learned = role == "assistant" if learned is None else learned
    return Turn(role=role, content=content, learned=learned, **more)


def pair(question: str, answer: str = "tell") -> Body:
    """Make a chat of one question and one answer."""
    return Body(turns=(turn("user", question), turn("assistant", answer)))


def write_tiny_run(
    folder: Path, *, lora: LoraSpec | None = None, n_steps: int = 30, **changes: Any
) -> None:
    """Write the records and files that a training job reads, for a random 2-layer model.

    ``changes`` are those of the training settings.
    """
    from expertflow.tokens.pack import pack_sequences

    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 97, rng.integers(5, 40)).tolist() for _ in range(200)]
    shard = token_shard(folder, documents)
    keep = keep_list(folder, {"000": [i % 10 == 0 for i in range(200)]})
    packing = pack_sequences(
        expert="tiny", spec=packing_spec(), shards=[shard], keep=keep, directory=folder / "packed"
    )
    tiny_qwen3(vocab_size=97, tie_word_embeddings=True).save_pretrained(folder / "base_model")
    facts = ModelFacts(
        n_layers=2, hidden_size=32, n_heads=4, n_kv_heads=2, head_dim=8, intermediate_size=64,
        vocab_size=97, tie_word_embeddings=True, model_type="qwen3",
    )  # fmt: skip
    method = "full" if lora is None else "lora"
    settings = {"method": method, "lora": lora, "max_steps": n_steps, **changes}
    draft = PlanDraft(
        expert="tiny", spec=plan_spec(**settings), packing=packing, facts=facts, n_params=20_000,
        gpu=None,
    )  # fmt: skip
    plan = plan_training(draft)
    staging = plan_staging(
        expert="tiny",
        spec=StageSpec(scratch=None),
        rows=read_content("rows", folder / "packed", "r"),
        weights=read_content("weights", folder / "base_model", "w"),
    )
    model = {
        "name": "tiny", "kind": "local", "revision": None, "path": str(folder / "base_model"),
        "license": None, "n_parameters": 20_000, "n_weight_bytes": 80_000,
        "weights_sha256": "w", "tokenizer": tokenizer_record(), "facts": facts,
    }  # fmt: skip
    records = (("packing", packing), ("plan", plan), ("staging", staging), ("model", model))
    for name, record in records:
        write_record(folder / f"{name}.json", record)


def train_on(net: Any, rows: PackedRows, *, n_steps: int) -> list[float]:
    """Train a model on all rows at once; return the losses."""
    import torch

    from expertflow.train.feed.batches import Collator
    from expertflow.train.model.packed import PackedLoss

    loss, losses = PackedLoss(net.train()), []
    optimizer = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=1e-2)
    batch = Collator(rows).batch(np.arange(len(rows)))
    for _ in range(n_steps):
        value = loss(batch) / batch.n_target_tokens
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def tiny_qwen3(*, seed: int = 0, scale: float = 1.0, **changes: Any) -> Any:
    """Make a random 2-layer Qwen3: unless scaled up, its weights repeat one token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64,
        "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return model
