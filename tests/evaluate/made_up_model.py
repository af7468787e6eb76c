"""A small random model, and an engine whose tokens are two letters each."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from expertflow.tokens.ragged import Ragged

VOCAB = 60
END, PAD = 1, 0


def tiny_qwen3(*, n_positions: int = 512, vocab_size: int = VOCAB) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=64, tie_word_embeddings=False,
        max_position_embeddings=n_positions,
    )  # fmt: skip
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(config).eval()
    # Random weights of the usual size repeat one token; larger ones vary.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return model


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
