"""Prepare a base model on disk: from the hub, a directory, or built in."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from expertflow.core.disk import check_space
from expertflow.core.errors import TrainingError
from expertflow.core.files import replacing, sha256_file, sha256_json
from expertflow.core.hashes import HashCache
from expertflow.plan.records import ModelFacts
from expertflow.tokens.records import TOKENIZER_FILES, TokenizerRecord
from expertflow.train.records import ModelRecord, ModelSpec

TINY_QWEN3 = "builtin:tiny-qwen3"
BUILTIN_LICENSE = "apache-2.0"  # random weights, drawn by this workflow and under its license
FETCH_AGAIN = "fetch or save the model again"
# Larger models are split into files that can be copied and read one by one.
MAX_SHARD = "5GB"
# Most licenses must be distributed with what they cover.
LICENSE_FILES = (
    "LICEN[CS]E*", "[Ll]icen[cs]e*", "NOTICE*", "COPYING*", "USE_POLICY*"
)  # fmt: skip
# How GPT-2 names its sizes.
OTHER_NAMES = {
    "num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
}  # fmt: skip
# Model types whose head is the embedding where config.json does not say.
TIED = {
    "cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gpt2",
    "smollm3", "starcoder2",
}  # fmt: skip
# Files of a hub model that are read or passed on.
WANTED_FILES = (
    "*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", *LICENSE_FILES, *TOKENIZER_FILES
)  # fmt: skip


def prepare_model(spec: ModelSpec, tokenizer: TokenizerRecord, directory: Path) -> ModelRecord:
    """Prepare a base model and its tokenizer to be read from one directory.

    Weights of hub and local models stay in place, unless added tokens need more rows. Raises
    TrainingError if the model is unreadable or its tokenizer is not the prepared one, DataError if
    there is no model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    revision = spec.revision
    kind: Literal["builtin", "local", "hub"]
    if spec.model.startswith("builtin:"):
        kind, path = "builtin", directory
        _make_builtin(spec, tokenizer, directory)
    elif Path(spec.model).expanduser().is_dir():
        kind, path = "local", Path(spec.model).expanduser()
    else:
        from expertflow.tokens.tokenizer import NO_MODEL, download_files

        kind = "hub"
        path = download_files(spec.model, revision, WANTED_FILES, fix=NO_MODEL)
        revision = path.name
    facts = read_facts(path)
    weights = weight_files(path)
    if not weights:
        raise TrainingError(f"{path}: no *.safetensors; only safetensors weights are supported")
    if spec.added_tokens and kind != "builtin":
        _add_tokens(path, spec.added_tokens, tokenizer.vocab_size, directory)
        path, facts, weights = directory, read_facts(directory), weight_files(directory)
    if sha256_file(path / TOKENIZER_FILES[0]) != tokenizer.sha256:
        raise TrainingError(
            f"{path / TOKENIZER_FILES[0]}: changed since {tokenizer.path} was made from it; delete"
            f" {tokenizer.path}.json and run again"
        )
    return ModelRecord(
        name=spec.model,
        kind=kind,
        revision=revision,
        path=str(path),
        license=spec.license or (BUILTIN_LICENSE if kind == "builtin" else None),
        facts=facts,
        n_parameters=count_parameters(weights, tied=facts.tie_word_embeddings),
        n_weight_bytes=sum(file.stat().st_size for file in weights),
        weights_sha256=hash_weights(path),
        tokenizer=tokenizer,
    )


def _add_tokens(source: Path, tokens: Sequence[str], n_tokens: int, output: Path) -> None:
    """Write a model with more tokens; its weights are links, unless they lack rows for these."""
    from expertflow.tokens.tokenizer import add_tokens

    is_grown = n_tokens > read_facts(source).vocab_size
    with replacing(output) as partial:
        for file in list_model_files(source):
            target = partial / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            if ".safetensors" not in file.name:
                shutil.copyfile(file, target)
            elif not is_grown:
                target.symlink_to(file.resolve())
        add_tokens(partial, tokens)
        if is_grown:
            _write_grown(source, n_tokens, partial)


def _write_grown(source: Path, n_rows: int, output: Path) -> None:
    """Write weights with more rows in embedding and head, each the mean of the existing rows."""
    import torch

    from expertflow.train.model.load import load_base, plain_attention

    model = load_base(str(source), dtype="auto", attention_name=plain_attention(source))
    n_old = model.get_input_embeddings().weight.shape[0]
    # transformers would draw new rows at random.
    model.resize_token_embeddings(n_rows, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            for parameter in layer.parameters():
                parameter[n_old:] = parameter[:n_old].float().mean(0)
    n_bytes = sum(tensor.nbytes for tensor in model.parameters())
    check_space([(output.parents[1], n_bytes, "the model with more tokens")])
    model.save_pretrained(output, max_shard_size=MAX_SHARD)


def weight_files(directory: Path) -> list[Path]:
    """List a model's weight files in order, without duplicates in another format."""
    files = sorted(directory.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("consolidated")]


def list_model_files(directory: Path) -> list[Path]:
    """List the files of a model's folder to read or pass on, sorted by name."""
    files = {file for pattern in WANTED_FILES for file in directory.glob(pattern)}
    others = set(directory.glob("*.safetensors")) - set(weight_files(directory))
    return sorted(file for file in files - others if file.is_file())


def hash_weights(directory: Path) -> str:
    hashes = HashCache()
    found = sha256_json([hashes.sha256(file) for file in weight_files(directory)])
    hashes.save()
    return found


def read_facts(directory: Path) -> ModelFacts:
    path = directory / "config.json"
    if not path.is_file():
        raise TrainingError(f"{directory}: no config.json; use a model directory or a hub id")
    try:
        config = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise TrainingError(f"{path}: not a JSON object ({error!s:.80}); {FETCH_AGAIN}") from error
    # The usual name wins where a config has both.
    config = {
        name: config[other] for name, other in OTHER_NAMES.items() if other in config
    } | config
    if config.get("model_type") == "gpt2" and not config.get("intermediate_size"):
        config["intermediate_size"] = 4 * config["hidden_size"]

    def count(key: str, otherwise: str = "") -> int:
        value = config[key] if config.get(key) or not otherwise else config[otherwise]
        if type(value) is not int or value < 1:
            raise TrainingError(f"{path}: {key} is {value!r:.60}, not a count; {FETCH_AGAIN}")
        return value

    try:
        heads, model_type = count("num_attention_heads"), str(config["model_type"])
        return ModelFacts(
            n_layers=count("num_hidden_layers"),
            hidden_size=count("hidden_size"),
            n_heads=heads,
            n_kv_heads=count("num_key_value_heads", "num_attention_heads"),
            head_dim=count("head_dim") if config.get("head_dim") else count("hidden_size") // heads,
            intermediate_size=count("intermediate_size"),
            vocab_size=count("vocab_size"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", model_type in TIED)),
            model_type=model_type,
        )
    except KeyError as error:
        raise TrainingError(
            f"{path}: no key {error}; model type {config.get('model_type')} is not supported; use"
            " one that names its sizes as Llama and Qwen do"
        ) from error


def _make_builtin(spec: ModelSpec, tokenizer: TokenizerRecord, output: Path) -> None:
    if spec.model != TINY_QWEN3:
        raise TrainingError(f"model {spec.model!r} is unknown; the builtin one is {TINY_QWEN3}")
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.n_heads,
        num_key_value_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with replacing(output) as partial:
        shutil.copytree(tokenizer.path, partial, ignore=shutil.ignore_patterns(".*"))
        torch.manual_seed(spec.seed)
        Qwen3ForCausalLM(config).save_pretrained(partial)


def count_parameters(files: list[Path], *, tied: bool) -> int:
    """Count the stored parameters; a tied head counts once, as embedding."""
    from safetensors import SafetensorError, safe_open

    n_parameters = 0
    for path in files:
        try:
            # It checks the complete header against the size of the file.
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118
                    if not (tied and name == "lm_head.weight"):
                        n_parameters += math.prod(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise TrainingError(
                f"{path}: not a safetensors file ({error}); {FETCH_AGAIN}"
            ) from error
    return n_parameters
