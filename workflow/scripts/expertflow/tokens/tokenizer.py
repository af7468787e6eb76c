"""Write a tokenizer to disk: from the hub, from a folder, or learned from documents.

Needs neither torch nor transformers, and only a few small files of a hub model, so that tokenizing
can start while its weights download.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from expertflow.core.disk import check_space, find_full
from expertflow.core.errors import ConfigError, DataError
from expertflow.core.files import replacing, sha256_file
from expertflow.data.cache import MOVE_CACHE, check_blobs, describe_full_cache, hub_cache
from expertflow.data.layout import CHATML, TEXT_END, TURN_END, TURN_START, read_layout
from expertflow.data.records import Body, Layout, Turn
from expertflow.data.render import Renderer
from expertflow.tokens.engine import Engine
from expertflow.tokens.records import TOKENIZER_FILES, TokenizerRecord, TokenizerSpec
from expertflow.tokens.tokenize import tokenize

BUILTIN = "builtin:"
# The key of tokenizer_config.json that lists added tokens.
LISTED = "added_tokens_decoder"
NO_MODEL = "correct the name, or download it on a machine with network access"


def prepare_tokenizer(
    spec: TokenizerSpec, texts: Iterable[str], directory: Path
) -> TokenizerRecord:
    """Write the tokenizer's files to ``directory``; DataError if none can be found or read.

    Only a builtin model without a given tokenizer reads ``texts``, the training documents.
    """
    with replacing(directory) as partial:
        partial.mkdir(parents=True)
        source = _source_folder(spec)
        if source is None:
            source = partial
            save_tokenizer(train_tokenizer(texts, vocab_size=spec.vocab_size), partial)
        else:
            # By pattern, so that a file that this model lacks is not an error.
            for file in (file for name in TOKENIZER_FILES for file in source.glob(name)):
                target = partial / file.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
        engine = Engine(source)
        layout = _checked_layout(source, spec, engine)
        if spec.added_tokens:
            add_tokens(partial, spec.added_tokens)
            engine = Engine(partial)
    sha256 = sha256_file(directory / TOKENIZER_FILES[0])
    return TokenizerRecord(
        path=str(directory), sha256=sha256, vocab_size=engine.vocab_size, layout=layout
    )


def _source_folder(spec: TokenizerSpec) -> Path | None:
    if spec.model.startswith(BUILTIN):
        return None if spec.tokenizer is None else Path(spec.tokenizer).expanduser()
    folder = Path(spec.model).expanduser()
    if folder.is_dir():
        return folder
    return download_files(spec.model, spec.revision, TOKENIZER_FILES, fix=NO_MODEL)


def _checked_layout(directory: Path, spec: TokenizerSpec, engine: Engine) -> Layout:
    """Read how the model writes chats; check that a chat has the same ids in parts and as one."""
    layout = read_layout(
        directory, choice=spec.chat_template, text_special_tokens=spec.text_special_tokens
    )
    if layout.chat_template is None or layout.problem is not None:
        return layout
    turns = tuple(
        Turn(role=role, content=text, learned=role == "assistant")
        for role, text in (("user", "What is 2 + 2?"), ("assistant", "It is 4.")) * 2
    )
    renderer = Renderer(layout)
    # An added token may strip spaces next to it (``lstrip``, ``rstrip``), and a normalizer may
    # prepend one: the ids of the parts are then not what the model was trained on.
    in_parts = tokenize([renderer.render(Body(turns=turns))], engine)
    if in_parts.ids[0].tolist() == engine.encode_with_special_tokens(
        renderer.text(Body(turns=turns))
    ):
        return layout
    return replace(
        layout, problem="its tokenizer encodes a whole chat differently than its separate parts"
    )


def add_tokens(directory: Path, tokens: Sequence[str]) -> None:
    """Add tokens to a saved tokenizer, to be found in texts; ConfigError if one already exists."""
    # transformers reads both files, so both must list the tokens.
    path, config = (directory / name for name in TOKENIZER_FILES[:2])
    tokenizer = Tokenizer.from_file(str(path))
    for token in tokens:
        if tokenizer.token_to_id(token) is not None:
            raise ConfigError(
                f"data.added_tokens: {token!r} is already in the model's tokenizer; remove it"
            )
    # Special ones would be plain characters in texts.
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])
    tokenizer.save(str(path))
    settings = json.loads(config.read_bytes()) if config.is_file() else {}
    if LISTED in settings:
        # If listed here, some transformers classes do not read those of tokenizer.json.
        found = tokenizer.get_added_tokens_decoder().items()
        new = {str(i): token.__getstate__() for i, token in found if token.content in tokens}
        settings[LISTED] |= new
        config.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Learn merges from texts, deterministically."""
    tokenizer = Tokenizer(models.BPE())
    # Numbers are not split into digits, as larger models prefer: with digits, a tiny one hardly
    # learns arithmetic (15 versus 77 % correct answers on generated word problems).
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return learn_merges(tokenizer, texts, vocab_size=vocab_size)


def learn_merges(tokenizer: Tokenizer, texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[TEXT_END, TURN_START, TURN_END],
        # All 256 bytes, so that a tokenizer trained on a few texts can encode any text.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write a tokenizer for transformers, chat template included."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": TEXT_END,
        "chat_template": CHATML,
        # Decoding would otherwise remove the space before a period or a comma.
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def download_files(name: str, revision: str | None, patterns: Sequence[str], *, fix: str) -> Path:
    """Find files of a hub model in the cache, or download them; the folder's name is its commit."""
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, RepositoryNotFoundError, XetDownloadError

    wanted = list(patterns)
    try:
        # Checked before the download, so that a full disk is found within a second.
        with suppress(DryRunError):  # where the hub is unreachable
            files = snapshot_download(name, revision=revision, allow_patterns=wanted, dry_run=True)
            n_bytes = sum(file.file_size for file in files if file.will_download)
            check_space([(hub_cache(), n_bytes, f"model {name}")], fix=MOVE_CACHE)
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except (OSError, ValueError, HTTPError, XetDownloadError) as error:
        if find_full(error):
            raise DataError(f"model {name}: {describe_full_cache()}") from error
        if isinstance(error, RepositoryNotFoundError):
            page = f"https://huggingface.co/{name}"
            fix = f"if it is gated or private, get access at {page} and 'hf auth login'; else {fix}"
        raise DataError(
            f"model {name}: neither a directory, nor in the cache, nor available from the hub"
            f" ({type(error).__name__}); {fix}"
        ) from error
    check_blobs(file for pattern in patterns for file in folder.glob(pattern))
    return folder
