"""Train TRL's SFTTrainer on exported rows and compare its loss with our own definition of it.

    python bench/train_exported.py --environments DIR    # as for bench/peers/environments.py

Random documents are packed, exported by workflow/scripts/export_rows.py and trained on for some
steps with a tiny random Qwen3 in float32 on the CPU. "ours" is the loss of the first step's
documents run one by one through the same weights: the mean over all targets, never the first token
of a document. TRL has to be within 1e-4 of it, and its data set has to be the exported one: the
very object where nothing is prepared, the same rows where it builds labels from the mask. The last
two cases are wrong on purpose, to show that the comparison notices: TRL reads the mask only with
``completion_only_loss=True``, and without ``padding_free`` documents see each other.

What keeps documents apart is ``padding_free=True``: only then the collator reads ``seq_lengths``,
gives position ids that begin again at every document, and no attention mask. From these
transformers 5 builds a block mask for sdpa and eager attention, quadratic in the tokens of a
micro-batch. On a GPU set ``model_init_kwargs={"attn_implementation": "flash_attention_2"}``, or
another flash attention that is installed: it takes the bounds of documents from the collator and
needs no mask. This was not run here.

Documents are NOT kept apart, and nothing says so, with
- ``padding_free=False`` (the default): ``seq_lengths`` is not read;
- ``packing=True``: an unpadded row counts as one document (padded ones TRL refuses to pack);
- context parallelism: TRL's source says that it drops the mask; it refuses ``packing=True`` then,
  but not rows that were packed elsewhere (read, not run).
Layers that carry a state need kernels that know the bounds: transformers 5.23 stops a packed batch
of Qwen3-Next with an error where ``causal_conv1d`` is not installed.

Prints a table; the last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from environments import environment, versions

from expertflow.tokens.arrow import RowBatch, write_rows
from expertflow.tokens.ragged import ragged

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-4
N_DOCUMENTS, LENGTH, VOCABULARY = 600, 128, 512
N_STEPS, GLOBAL_BATCH = 20, 4
IGNORE = -100
FORMS = {
    "padded": ["--labels"],
    "unpadded": ["--labels", "--unpadded"],
    "mask": ["--completion-mask"],
}
# What a case leaves out is: padded rows, sdpa, one micro-batch a step, no preparation, equal.
CASES: list[dict[str, Any]] = [
    {"case": "padded rows"},
    {"case": "unpadded rows", "form": "unpadded"},
    {"case": "eager attention", "attention": "eager"},
    {"case": "two micro-batches", "micro_batch": 2},
    {"case": "completion mask", "form": "mask", "prepare": True, "completion_only": True},
    {"case": "mask left unused", "form": "mask", "prepare": True, "equal": False},
    {"case": "padding_free=False", "padding_free": False, "equal": False},
]


def make_documents(rng: np.random.Generator) -> list[dict[str, list[int]]]:
    """Make documents of random ids: targets at the end, in two places, everywhere or nowhere."""
    made = []
    for kind in rng.integers(0, 4, N_DOCUMENTS).tolist():
        n = int(rng.integers(1, 60))
        a, b, c = sorted(rng.integers(0, n + 1, 3).tolist())
        spans = [[c, n], [a, b, c, n], [0, n], []][kind]
        made.append({"ids": rng.integers(2, VOCABULARY, n).tolist(), "spans": spans})
    return made


def pack(documents: list[dict[str, list[int]]]) -> list[list[int]]:
    """Fill rows with documents in their order, a new row where one does not fit."""
    rows: list[list[int]] = [[]]
    used = 0
    for number, document in enumerate(documents):
        if used + len(document["ids"]) > LENGTH:
            rows.append([])
            used = 0
        rows[-1].append(number)
        used += len(document["ids"])
    return rows


def write_packed(
    folder: Path, documents: list[dict[str, list[int]]], rows: list[list[int]]
) -> None:
    """Write the rows as the workflow does."""
    ids = np.zeros((len(rows), LENGTH), np.int32)
    lengths, spans = [], []
    for i, row in enumerate(rows):
        offset, row_spans = 0, []
        for number in row:
            document = documents[number]
            n = len(document["ids"])
            ids[i, offset : offset + n] = document["ids"]
            row_spans += [offset + bound for bound in document["spans"]]
            offset += n
        lengths.append([len(documents[number]["ids"]) for number in row])
        spans.append(row_spans)
    write_rows(folder, iter([RowBatch(ids, ragged(lengths), ragged(spans))]), length=LENGTH)


def main() -> None:
    """Write, export, and train in TRL's environment."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--environments", type=Path, help="folder of virtual environments")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker)
    if not args.environments:
        parser.error("--environments is required")
    built = environment("trl", args.environments)
    if built.problem:
        sys.exit(f"error: TRL cannot be installed: {built.problem}")
    documents = make_documents(np.random.default_rng(0))
    rows = pack(documents)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_packed(folder / "packed", documents, rows)
        for form, options in FORMS.items():
            script = ROOT / "workflow" / "scripts" / "export_rows.py"
            places = ["--rows", str(folder / "packed"), "--output", str(folder / form)]
            subprocess.run([sys.executable, str(script), *places, *options], check=True)
        first = [documents[number] for row in rows[:GLOBAL_BATCH] for number in row]
        (folder / "first.json").write_text(json.dumps(first))
        command = [str(built.python), __file__, "--worker", str(folder)]
        subprocess.run(command, check=True)
        results = json.loads((folder / "results.json").read_text())
    report(results, versions(built))


def report(results: list[dict[str, Any]], packages: dict[str, str]) -> None:
    """Print the table and the JSON line; fail where a case is not as it has to be."""
    print(
        f"{'case':>20} {'ours':>9} {'TRL':>9} {'apart by':>9} {'step 20':>9}  data set  as expected"
    )
    for r in results:
        r["as_expected"] = r["kept"] and (r["difference"] <= TOLERANCE) == r["equal"]
        kept = "exported" if r["untouched"] else "labelled" if r["kept"] else "changed"
        print(
            f"{r['case']:>20} {r['ours']:9.5f} {r['trl']:9.5f} {r['difference']:9.1e} "
            f"{r['last']:9.5f}  {kept:>8}  {'yes' if r['as_expected'] else 'NO'}"
        )
    print(json.dumps({"packages": packages, "cases": results}))
    sys.exit(not all(r["as_expected"] for r in results))


def work(folder: Path) -> None:
    """Train every case; runs in TRL's environment."""
    documents = json.loads((folder / "first.json").read_text())
    save_model(folder / "model")
    loss = documents_loss(folder / "model", documents)
    results = []
    for case in CASES:
        result = {"case": case["case"], "equal": case.get("equal", True), "ours": loss}
        result |= train(folder, case)
        results.append(result | {"difference": abs(result["trl"] - loss)})
    (folder / "results.json").write_text(json.dumps(results))


def save_model(folder: Path) -> None:
    """Save a random model and a tokenizer that knows nothing but its special tokens."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    # Wide weights: with the usual ones a token hardly notices what it sees, and nothing would show.
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        head_dim=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)


def documents_loss(folder: Path, documents: list[dict[str, list[int]]]) -> float:
    """Give the mean loss of all targets, each document alone."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, n_targets = 0.0, 0
    for document in documents:
        ids = torch.tensor(document["ids"])
        labels = torch.full_like(ids, IGNORE)
        for start, end in zip(document["spans"][::2], document["spans"][1::2], strict=True):
            labels[start:end] = ids[start:end]
        # Position i predicts i + 1, so the first token of a document drops out here.
        targets = labels[1:]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        n_targets += int((targets != IGNORE).sum())
    return total / n_targets


def train(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Train one case; tell the losses and what became of the data set."""
    import torch
    from datasets import load_from_disk
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import SFTConfig, SFTTrainer

    rows = load_from_disk(str(folder / case.get("form", "padded")))
    attention = case.get("attention", "sdpa")
    micro_batch = case.get("micro_batch", GLOBAL_BATCH)
    prepare = case.get("prepare", False)
    config = SFTConfig(
        output_dir=str(folder / "trained"), save_strategy="no", report_to="none", use_cpu=True,
        bf16=False, max_steps=N_STEPS, logging_steps=1, disable_tqdm=True, learning_rate=1e-3,
        log_level="error",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=GLOBAL_BATCH // micro_batch,
        train_sampling_strategy="sequential", max_length=None,
        padding_free=case.get("padding_free", True),
        completion_only_loss=case.get("completion_only"),
        dataset_kwargs=None if prepare else {"skip_prepare_dataset": True},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation=attention, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = SFTTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    seen = trainer.train_dataset
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    same = [seen[name][:] == rows[name][:] for name in ("input_ids", "seq_lengths")]
    return {
        "trl": losses[0],
        "last": losses[-1],
        "untouched": seen is rows,
        "kept": seen is rows or all(same),
    }


if __name__ == "__main__":
    main()
