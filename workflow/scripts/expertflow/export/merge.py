"""Write the model that people load: adapter merged in full precision, checked before it counts."""

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from expertflow.core.errors import TrainingError
from expertflow.core.files import replacing, sha256_file, sha256_json
from expertflow.data.records import Layout
from expertflow.export.card import model_card
from expertflow.export.records import ExportRecord
from expertflow.tokens.engine import Engine
from expertflow.train.model import causal_lm

PROBE_TOKENS = 64
# Merging changes the order of fp32 sums and nothing else; more than this is a damaged merge.
MAX_LOGIT_DIFFERENCE = 1e-2


@torch.no_grad()
def export_model(
    *,
    expert: str,
    model: Any,
    tokenizer: Path,
    layout: Layout,
    decoding: dict[str, Any],
    card: dict[str, Any],
    output: Path,
) -> ExportRecord:
    """Merge, compare logits with the trained model, and write weights, tokenizer and card.

    Raises:
        TrainingError: merging moved the logits by more than rounding does.
    """
    lm = causal_lm(model).eval()
    probe = torch.arange(PROBE_TOKENS)[None] % lm.config.vocab_size
    trained = model(input_ids=probe, use_cache=False).logits
    merged = hasattr(model, "merge_and_unload")
    plain = model.merge_and_unload() if merged else lm
    difference = float((plain(input_ids=probe, use_cache=False).logits - trained).abs().max())
    if difference > MAX_LOGIT_DIFFERENCE * max(1.0, float(trained.abs().max())):
        raise TrainingError(
            f"{expert}: merging moved the logits by {difference:.3g}; the adapter stays unmerged in"
            f" results/{expert}/checkpoint"
        )
    set_decoding(
        plain, decoding, end_id=Engine(tokenizer).special_id(layout.turn_end or layout.text_end)
    )
    with replacing(output) as partial:
        partial.mkdir(parents=True)
        plain.save_pretrained(partial, safe_serialization=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (tokenizer / name).is_file():
                (partial / name).write_bytes((tokenizer / name).read_bytes())
        if layout.chat_template is not None:
            # The template of training, which a manifest may have set; it wins over the settings'.
            (partial / "chat_template.jinja").write_text(layout.chat_template, encoding="utf-8")
        (partial / "README.md").write_text(model_card(card), encoding="utf-8")
    weights = sorted(output.glob("*.safetensors"))
    return ExportRecord(
        expert=expert,
        path=str(output),
        dtype=str(plain.dtype).removeprefix("torch."),
        merged=merged,
        max_logit_difference=difference,
        weights_sha256=sha256_json([sha256_file(path) for path in weights]),
        n_bytes=sum(path.stat().st_size for path in weights),
    )


def set_decoding(model: Any, decoding: dict[str, Any], *, end_id: int) -> None:
    """Let the manifest's decoding settings travel with the model; temperature 0 is greedy.

    They replace those of the base model, which would not be valid beside a greedy setting.
    """
    sampled = decoding if decoding["temperature"] > 0 else {}
    model.generation_config = GenerationConfig(
        eos_token_id=end_id, do_sample=bool(sampled), **sampled
    )
