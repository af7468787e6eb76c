"""A tokenizer as GGUF holds it: byte-level BPE, split by a rule that llama.cpp has a name for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from expertflow.data.records import Layout
from expertflow.tokens.engine import TOKENIZER_FILE

# Kinds of tokens, as GGUF numbers them.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Expressions that split a text before the merges, and llama.cpp's name of the rule.
SPLITS = {_SPLIT % r"\p{N}": "qwen2", _SPLIT % r"\p{N}{1,3}": "llama-bpe"}
# Under this one, a word that is a token is taken whole, whatever the merges say.
WHOLE_WORDS = "llama-bpe"


class NotWritable(Exception):
    """Something that GGUF, or what is written of it here, has no place for; says what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Tokens by id with their kinds, merges in order, and the ids that have a meaning."""

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[str, ...]
    pre_tokenizer: str
    special_ids: dict[str, int]
    adds_bos: bool
    adds_eos: bool


def read_vocabulary(folder: Path, *, vocab_size: int, layout: Layout) -> Vocabulary:
    """Read a tokenizer. Ids up to ``vocab_size`` that have no token are marked as unused.

    Raises:
        NotWritable: it is no byte-level BPE, or splits texts in a way that has no name.
    """
    text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
    settings = json.loads(text)
    pre_tokenizer = _checked(settings)
    tokens, kinds = _tokens(settings, vocab_size)
    ids = {token: i for i, token in enumerate(tokens)}
    named = {
        "bos": layout.bos,
        "eos": layout.turn_end or layout.text_end,
        "eot": layout.turn_end,
        "pad": layout.text_end,
    }
    special_ids = {role: ids[token] for role, token in named.items() if token in ids}
    around = tokenizers.Tokenizer.from_str(text).encode("a").ids
    return Vocabulary(
        tokens=tokens,
        kinds=kinds,
        merges=tuple(m if isinstance(m, str) else " ".join(m) for m in settings["model"]["merges"]),
        pre_tokenizer=pre_tokenizer,
        special_ids=special_ids,
        adds_bos=around[0] == special_ids.get("bos"),
        adds_eos=len(around) > 1 and around[-1] == special_ids["eos"],
    )


def _tokens(settings: dict[str, Any], vocab_size: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    names = {i: token for token, i in settings["model"]["vocab"].items()}
    kinds = dict.fromkeys(names, NORMAL)
    for added in settings["added_tokens"]:
        names[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if max(names) >= vocab_size:
        raise NotWritable(f"the tokenizer has id {max(names)}, the model {vocab_size} tokens")
    every = range(vocab_size)
    return (
        tuple(names.get(i, f"[PAD{i}]") for i in every),
        tuple(kinds.get(i, UNUSED) for i in every),
    )


def _checked(settings: dict[str, Any]) -> str:
    """Give the name of the rule that splits texts; refuse what GGUF cannot say."""
    model = settings["model"]
    unusual = [
        key
        for key in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if model.get(key)
    ]
    normalizer = (settings.get("normalizer") or {}).get("type", "NFC")
    if model["type"] != "BPE" or (settings.get("decoder") or {}).get("type") != "ByteLevel":
        raise NotWritable(f"the tokenizer is {model['type']}, and only byte-level BPE is written")
    if unusual or normalizer != "NFC":
        raise NotWritable(f"the tokenizer uses {', '.join(unusual) or normalizer}")
    name = _rule_name(settings.get("pre_tokenizer") or {})
    if name is None:
        raise NotWritable("the tokenizer splits texts by a rule that llama.cpp has no name for")
    if bool(model.get("ignore_merges")) != (name == WHOLE_WORDS):
        raise NotWritable(f"the tokenizer splits texts as {name} but treats whole words otherwise")
    return name


def _rule_name(pre_tokenizer: dict[str, Any]) -> str | None:
    """Find llama.cpp's name of a splitting rule, which it knows by the expression alone."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    by_words = last.get("use_regex", True)
    if len(steps) == 1:
        return "gpt-2" if by_words else None
    first = steps[0]
    if len(steps) > 2:
        return None
    if first.get("type") == "Digits" and first.get("individual_digits") and by_words:
        return "smollm"
    isolated = first.get("behavior") == "Isolated" and not first.get("invert")
    if first.get("type") == "Split" and isolated and not by_words:
        return SPLITS.get(first["pattern"].get("Regex", ""))
    return None
