"""One GGUF file of a merged model, for llama.cpp; read back and compared before it counts.

gguf is an extra, imported only where a manifest asks for the file. Tensors pass one by one, so the
largest one is all that is in memory.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from expertflow.core.files import sha256_file
from expertflow.data.records import Layout
from expertflow.export.gguf_vocabulary import NotWritable, Vocabulary, read_vocabulary
from expertflow.export.records import GgufFile
from expertflow.train.model.base import weight_files

EXTRA = "envs/requirements-gguf.lock"
# Architectures whose files were run by llama.cpp and gave the same answers: docs/exporting.md.
ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
# llama.cpp's numbers of the types that most tensors of a file have.
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
# How far a tensor may be from the merged one, of its largest value: half a step of the type, with
# some room. One block of q8_0 has 127 steps and a scale in 16 bits.
ALLOWED = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 200}
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor and its place in the file; ``read`` gives its values in fp32."""

    name: str
    shape: tuple[int, ...]
    kind: Any
    read: Callable[[], Floats]


def hindrance() -> str | None:
    """Say why no file can be written; null where it can."""
    if find_spec("gguf") is None:
        return f"the gguf package is not installed; run pip install -r {EXTRA}"
    return None


def write_gguf(
    folder: Path, *, dtype: str, name: str, shown_in: Path, layout: Layout
) -> tuple[GgufFile | None, str | None]:
    """Write a merged model's GGUF file beside it; or nothing, and give the reason.

    The record names the file as it will lie in ``shown_in``.
    """
    if (reason := hindrance()) is not None:
        return None, reason
    path = folder / f"{name}-{dtype}.gguf"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        _check_architecture(config)
        vocabulary = read_vocabulary(folder, vocab_size=config["vocab_size"], layout=layout)
        placed = list(_placed(folder, config, dtype))
    except NotWritable as error:
        return None, f"{error}; convert the folder with llama.cpp's own converter"
    _write(path, placed, config=config, dtype=dtype, name=name, told=(vocabulary, layout))
    difference = largest_difference(path, placed)
    # Written so that what is not a number is refused as well.
    if not difference <= ALLOWED[dtype]:
        path.unlink()
        return None, f"its tensors, read back as {dtype}, were off by {difference:.2g} of the most"
    return GgufFile(
        path=str(shown_in / path.name),
        dtype=dtype,
        sha256=sha256_file(path),
        n_bytes=path.stat().st_size,
        max_relative_difference=difference,
    ), None


def largest_difference(path: Path, placed: list[Placed]) -> float:
    """Read a file back; give the largest difference of a tensor, as a part of its largest value.

    Infinite where a tensor is missing, besides, or of another shape.
    """
    gguf = _gguf()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    if set(stored) != {item.name for item in placed}:
        return float("inf")
    differences = [0.0]
    for item in placed:
        tensor = stored[item.name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        wanted = item.read()
        if values.shape != wanted.shape:
            return float("inf")
        scale = float(np.abs(wanted).max()) or 1.0
        differences.append(float(np.abs(values - wanted).max()) / scale)
    return float(np.max(differences))


def _gguf() -> Any:
    return importlib.import_module("gguf")


def _check_architecture(config: dict[str, Any]) -> None:
    kind, rope = config["model_type"], _rope(config)
    if kind not in ARCHITECTURES:
        raise NotWritable(f"{kind} models are not written, only {', '.join(ARCHITECTURES)}")
    if rope.get("rope_type", "default") != "default":
        raise NotWritable(f"the model scales its positions ({rope['rope_type']})")
    if config.get("use_sliding_window") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotWritable("the model has sliding windows or positions in a part of its heads")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise NotWritable("the model has biases that such models do not have as a rule")
    if config.get("hidden_act", "silu") != "silu":
        raise NotWritable(f"the model's activation is {config['hidden_act']}, not silu")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", 10_000.0), **rope}


def _placed(folder: Path, config: dict[str, Any], dtype: str) -> Iterator[Placed]:
    """Find the place of each tensor.

    Raises:
        NotWritable: one has none.
    """
    gguf = _gguf()
    kinds = gguf.GGMLQuantizationType
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[config["model_type"]]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        for key, shape in sorted(shapes.items()):
            if key == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            place = names.get_name(key, try_suffixes=(".weight", ".bias"))
            if place is None:
                raise NotWritable(f"tensor {key} has no place in a {config['model_type']} file")
            kind = kinds[dtype.upper()]
            if len(shape) == 1:
                kind = kinds.F32
            elif dtype == "q8_0" and shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
                kind = kinds.F16
            yield Placed(place, shape, kind, _reader(path, key, config))


def _reader(path: Path, key: str, config: dict[str, Any]) -> Callable[[], Floats]:
    def read() -> Floats:
        with safe_open(path, framework="pt") as file:
            values: Floats = file.get_tensor(key).float().numpy()
        part = key.split(".")[-2] if "." in key else ""
        if config["model_type"] == "llama" and part in HEADS:
            return _turned(values, config[HEADS[part]])
        return values

    return read


def _turned(values: Floats, n_heads: int) -> Floats:
    """Order the rows of each head for positions that turn neighbours, not halves."""
    halves = values.reshape(n_heads, 2, len(values) // n_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _write(
    path: Path,
    placed: list[Placed],
    *,
    config: dict[str, Any],
    dtype: str,
    name: str,
    told: tuple[Vocabulary, Layout],
) -> None:
    gguf = _gguf()
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]].lower())
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config)
    _add_vocabulary(writer, *told)
    for item in placed:
        in_bytes = item.kind.name in ("Q8_0", "BF16")
        shape = gguf.quant_shape_to_byte_shape(item.shape, item.kind) if in_bytes else item.shape
        numbers = np.dtype({"F32": np.float32, "F16": np.float16}.get(item.kind.name, np.uint8))
        n_bytes = int(np.prod(shape)) * numbers.itemsize
        writer.add_tensor_info(item.name, shape, numbers, n_bytes, raw_dtype=item.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for item in placed:
        writer.write_tensor_data(gguf.quantize(item.read(), item.kind))
    writer.close()


def _add_shape(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(_rope(config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_vocabulary(writer: Any, vocabulary: Vocabulary, layout: Layout) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges(vocabulary.merges)
    for role, token_id in vocabulary.special_ids.items():
        getattr(writer, f"add_{role}_token_id")(token_id)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if layout.chat_template is not None:
        writer.add_chat_template(layout.chat_template)
