"""A small random model, and an engine with tokens of two letters."""

from typing import Any

import support
import torch

from expertflow.tokens.ragged import Ragged

VOCAB = 60
END, PAD = 1, 0


def tiny_qwen3(*, n_positions: int = 512, vocab_size: int = VOCAB) -> Any:
    shape = {"vocab_size": vocab_size, "max_position_embeddings": n_positions}
    return support.tiny_qwen3(seed=3, scale=6, **shape).eval()


class Pairs:
    """An engine whose token i is two characters, such as Ca or Db."""

    name, version, sha256 = "pairs", "0", ""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("A") + i % 26) + chr(ord("a") + i // 26) for i in ids)

    def encode_flat(self, texts: list[str]) -> Ragged:
        pairs = ([text[i : i + 2] for i in range(0, len(text), 2)] for text in texts)
        return Ragged.from_lists(
            [[ord(a) - ord("A") + 26 * (ord(b) - ord("a")) for a, b in p] for p in pairs]
        )

    def special_id(self, token: str) -> int:
        return {"<|endoftext|>": PAD, "<|im_end|>": END}[token]


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]
