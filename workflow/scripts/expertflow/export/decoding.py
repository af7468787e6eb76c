"""Let the manifest's decoding settings travel with the exported model."""

from typing import Any

from transformers import GenerationConfig

from expertflow.evaluate.records import Decoding


def set_decoding(
    model: Any, decoding: Decoding, *, end_id: int, text_end_id: int | None = None
) -> None:
    """Write how answers are decoded into the model's generation config; temperature 0 is greedy.

    They replace the base model's settings: sampling settings are not valid beside a greedy one, and
    penalties would give other answers than those that were scored. Its ends of text stay ends.
    Stop texts are obeyed where ``generate`` is given the tokenizer.
    """
    own = model.generation_config
    ends = sorted({end_id} | end_ids(own) | ({text_end_id} if text_end_id is not None else set()))
    sampled: dict[str, Any] = {}
    if decoding.temperature > 0:
        sampled = {
            "temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": decoding.top_k
        }  # fmt: skip
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends,
        pad_token_id=text_end_id,
        do_sample=bool(sampled),
        stop_strings=list(decoding.stop) or None,
        **sampled,
    )


def end_ids(config: Any) -> set[int]:
    """Give the tokens that end a text by a generation config: none, one, or several."""
    ends = config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
