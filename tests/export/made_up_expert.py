"""A small random model that writes letters, exported like an expert."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from expertflow.evaluate.records import Decoding
from expertflow.export.model_files import set_decoding
from expertflow.tokens.tokenizer import save_tokenizer, train_tokenizer

N_POSITIONS = 120
# Settings of chat models, which a manifest's settings replace.
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 2.0}


def export(folder: Path, decoding: Decoding, *, own_ends: list[int] | None = None) -> Any:
    """Write tokenizer and model; return the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(["what is two and two"] * 3, vocab_size=300)
    save_tokenizer(tokenizer, folder)
    config = Qwen3Config(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=64, tie_word_embeddings=False,
        max_position_embeddings=N_POSITIONS, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.generation_config.update(**SAMPLING, eos_token_id=own_ends)
    with torch.no_grad():
        # Random weights of the usual size repeat one token; larger ones vary.
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
        for token in range(300):
            text = tokenizer.decode([token], skip_special_tokens=False).replace(" ", "")
            if not (text.isascii() and text.isalpha()):
                model.lm_head.weight[token] = 0
    end, text_end = (tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>"))
    set_decoding(model, decoding, end_id=end, text_end_id=text_end)
    model.save_pretrained(folder)
    return tokenizer
