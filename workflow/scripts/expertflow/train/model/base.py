"""Put a base model and its tokenizer on disk: from the hub, a directory, or made on the spot."""

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from expertflow.core.errors import TrainingError
from expertflow.core.files import replacing, sha256_file, sha256_json
from expertflow.data.layout import CHATML, TEXT_END, TURN_END, TURN_START, read_layout
from expertflow.data.records import Body, Layout, Turn
from expertflow.data.render import Renderer
from expertflow.plan.flops import mlp_matrices
from expertflow.plan.records import ModelFacts
from expertflow.tokens.engine import Engine
from expertflow.tokens.tokenize import tokenize
from expertflow.train.records import ModelRecord, ModelSpec

BUILTIN = "builtin:"
TINY_QWEN3 = "builtin:tiny-qwen3"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# Most licences ask that their text travels with what they cover.
LICENCE_FILES = (
    "LICEN[CS]E*", "[Ll]icen[cs]e*", "NOTICE*", "COPYING*", "USE_POLICY*"
)  # fmt: skip
# Of a hub model's files, those that are read or handed on.
WANTED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", *LICENCE_FILES)


def prepare_model(spec: ModelSpec, texts: Iterable[str], output: Path) -> ModelRecord:
    """Make the base model readable from one directory.

    ``texts`` are the training documents, which only a builtin model without a given tokenizer
    reads. Weights of hub and local models stay where they are.

    Raises:
        TrainingError: the model cannot be found or read.
    """
    revision = spec.revision
    kind: Literal["builtin", "local", "hub"]
    if spec.model.startswith(BUILTIN):
        kind, path = "builtin", output
        _make_builtin(spec, texts, output)
    elif Path(spec.model).expanduser().is_dir():
        kind, path = "local", Path(spec.model).expanduser()
    else:
        kind = "hub"
        fix = "correct the name, or download it where there is a network"
        path = download_model(spec.model, revision, fix=fix)
        revision = path.name
    facts = read_facts(path)
    weights = weight_files(path)
    if not weights:
        raise TrainingError(f"{path}: no *.safetensors; only safetensors weights are read")
    if not (path / TOKENIZER_FILES[0]).is_file():
        raise TrainingError(f"{path}: no tokenizer.json; save the model with its fast tokenizer")
    return ModelRecord(
        name=spec.model,
        kind=kind,
        revision=revision,
        path=str(path),
        licence=spec.licence,
        facts=facts,
        n_parameters=sum(
            _count_parameters(file, tied=facts.tie_word_embeddings) for file in weights
        ),
        n_weight_bytes=sum(file.stat().st_size for file in weights),
        tokenizer_sha256=sha256_file(path / TOKENIZER_FILES[0]),
        weights_sha256=hash_weights(path),
        layout=checked_layout(path, spec),
    )


def weight_files(directory: Path) -> list[Path]:
    """List the files of a model's weights, in their order; repeats in another form are left out."""
    files = sorted(directory.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("consolidated")]


def wanted_files(directory: Path) -> list[Path]:
    """List what is read or handed on of a model's folder, in the order of the names."""
    files = {file for pattern in WANTED_FILES for file in directory.glob(pattern)}
    weights = set(weight_files(directory))
    return sorted(
        file
        for file in files
        if file.is_file() and (file.suffix != ".safetensors" or file in weights)
    )


def hash_weights(directory: Path) -> str:
    return sha256_json([sha256_file(file) for file in weight_files(directory)])


def checked_layout(directory: Path, spec: ModelSpec) -> Layout:
    """Read how the model writes chats; compare one with how its tokenizer reads the whole of it."""
    layout = read_layout(
        directory, choice=spec.chat_template, text_special_tokens=spec.text_special_tokens
    )
    if layout.chat_template is None or layout.problem is not None:
        return layout
    turns = tuple(
        Turn(role=role, content=text, learned=role == "assistant")
        for role, text in (("user", "What is 2 + 2?"), ("assistant", "It is 4.")) * 2
    )
    renderer, engine = Renderer(layout), Engine(directory)
    in_parts = tokenize([renderer.render(Body(turns=turns))], engine)
    if in_parts.ids[0].tolist() == engine.encode_whole(renderer.text(Body(turns=turns))):
        return layout
    return replace(
        layout, problem="its tokenizer reads a whole chat otherwise than its parts one by one"
    )


def read_facts(directory: Path) -> ModelFacts:
    """Read a dense decoder's shape from its config.json."""
    path = directory / "config.json"
    if not path.is_file():
        raise TrainingError(f"{directory}: no config.json; give a model directory or a hub id")
    config = json.loads(path.read_text(encoding="utf-8"))
    try:
        heads = config["num_attention_heads"]
        return ModelFacts(
            n_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            n_heads=heads,
            n_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            model_type=config["model_type"],
            n_mlp_matrices=mlp_matrices(config["model_type"]),
        )
    except KeyError as error:
        raise TrainingError(f"{path}: no key {error}; only dense decoder models work") from error


def _make_builtin(spec: ModelSpec, texts: Iterable[str], output: Path) -> None:
    if spec.model != TINY_QWEN3:
        raise TrainingError(f"model {spec.model!r} is not known; the builtin one is {TINY_QWEN3}")
    with replacing(output) as partial:
        partial.mkdir(parents=True)
        if spec.tokenizer is None:
            save_tokenizer(train_tokenizer(texts, vocab_size=spec.vocab_size), partial)
        else:
            source = Path(spec.tokenizer).expanduser()
            for name in TOKENIZER_FILES:
                if not (source / name).is_file():
                    raise TrainingError(f"{source}: no {name}; correct the manifest's tokenizer")
                shutil.copyfile(source / name, partial / name)
        _init_tiny_qwen3(spec, partial)


def _init_tiny_qwen3(spec: ModelSpec, directory: Path) -> None:
    """Write random weights, a pure function of shape and seed."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = json.loads((directory / TOKENIZER_FILES[0]).read_text(encoding="utf-8"))
    ids = [*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])]
    config = Qwen3Config(
        # Up to the highest id.
        vocab_size=max(ids) + 1,
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
    torch.manual_seed(spec.seed)
    Qwen3ForCausalLM(config).save_pretrained(directory)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Learn merges from texts. The same texts in the same order give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    # Numbers stay whole: split into digits, as larger models want it, a tiny one hardly learns
    # arithmetic (15 against 77 % right answers on generated word problems).
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return learn_merges(tokenizer, texts, vocab_size=vocab_size)


def learn_merges(tokenizer: Tokenizer, texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[TEXT_END, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write a tokenizer as transformers loads it, chat template included."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": TEXT_END,
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def download_model(name: str, revision: str | None, *, fix: str) -> Path:
    """Find a hub model in the cache, or download it; the name of its folder is its commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(WANTED_FILES)))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise TrainingError(
            f"model {name}: neither a directory, nor in the cache, nor to be had from the hub"
            f" ({type(error).__name__}); {fix}"
        ) from error


def _count_parameters(path: Path, *, tied: bool) -> int:
    """Count a file's parameters; a tied head that is stored again counts once, as embedding."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        names = [key for key in file.keys() if not (tied and key == "lm_head.weight")]  # noqa: SIM118
        shapes = [file.get_slice(name).get_shape() for name in names]
    return sum(map(math.prod, shapes))
