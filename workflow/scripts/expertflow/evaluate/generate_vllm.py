"""Answer held-out questions with vLLM, where it is installed and there is a card.

Written against the documented interface of vLLM 0.1x to 0.3x and tested with a stand-in for it.
vLLM loads the model itself, so no other may be on the card meanwhile.
"""

import gc
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.generate import Answer, finished, room_of, seed_text, unasked
from expertflow.evaluate.records import Backend, Decoding
from expertflow.plan.records import LoraSpec
from expertflow.tokens.engine import TOKENIZER_FILE, Encoder

log = logging.getLogger(__name__)
Name = Literal["transformers", "vllm"]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# The sizes that vLLM makes room for; an adapter of another rank takes the next one.
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# It would report its use to its makers.
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
N_SEED_BYTES = 4


def choose_backend(
    wanted: Backend, *, method: str, lora: LoraSpec | None, precision: str = "bf16"
) -> tuple[Name, str | None]:
    """Give what writes the answers, and why it is not vLLM where that was wanted if possible.

    Raises:
        EvaluationError: the manifest insists on vLLM, which cannot be used.
    """
    if wanted == "transformers":
        return "transformers", None
    reason = hindrance() or _unfit(method, lora, precision)
    if reason is None:
        return "vllm", None
    if wanted == "vllm":
        raise EvaluationError(
            f"evaluation.backend vllm: {reason}; set it to transformers, or to auto"
        )
    log.info("answers are written by transformers: %s", reason)
    return "transformers", reason


def hindrance() -> str | None:
    """Say why vLLM cannot be used on this machine; null if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    if not torch.cuda.is_available():
        return "vllm needs a card, and there is none"
    return None


def _unfit(method: str, lora: LoraSpec | None, precision: str) -> str | None:
    """Say why vLLM cannot run what was trained; null if it can."""
    if method == "qlora":
        return "the base is in 4 bits as training holds it, which vllm does not load"
    if lora is not None and lora.use_dora:
        return "vllm does not know DoRA adapters"
    if lora is not None and precision == "fp32":
        return "vllm runs adapters in bf16 and fp16, and this one was trained in fp32"
    if lora is not None and lora.r > LORA_RANKS[-1]:
        return f"vllm takes adapters up to rank {LORA_RANKS[-1]}, and this one has {lora.r}"
    return None


def answers(
    base: Path,
    adapter: Path | None,
    prompts: Sequence[list[int]],
    *,
    engine: Encoder,
    end_id: int,
    pad_id: int,
    decoding: Decoding,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    precision: str = "bf16",
) -> tuple[list[Answer], float]:
    """Continue each prompt (token ids) until it ends by itself; in the order of the prompts.

    With the seconds of writing: starting the engine takes minutes, in which nothing is written.

    ``base`` is a whole model, trained or not, and ``adapter`` what was trained on it. Answers end
    as those of ``generate.answers`` do. They may differ from them, and from run to run, where two
    tokens are about equal: vLLM batches as it sees fit.
    """
    n_positions, own_ends = _own_settings(base)
    ends = frozenset({end_id, pad_id, *own_ends})
    rooms = [room_of(prompt, n_positions, max_new_tokens) for prompt in prompts]
    found = {i: unasked(len(prompts[i])) for i, room in enumerate(rooms) if not room}
    asked = [i for i, room in enumerate(rooms) if room]
    duration_s = 0.0
    if asked:
        # Only where there is a tokenizer can vLLM look for stop texts; else they are cut off here.
        reads = bool(decoding.stop) and (base / TOKENIZER_FILE).is_file()
        longest = max(len(prompts[i]) + rooms[i] for i in asked)
        options = _options(base, adapter, precision=precision, reads=reads, seed=seed)
        with _loaded(max_model_len=longest, max_num_seqs=batch_size, **options) as llm:
            params = [
                _sampling(decoding, ends, rooms[i], seed=_seed(prompts[i], seed), reads=reads)
                for i in asked
            ]
            start = time.perf_counter()
            outputs = llm.generate(
                [{"prompt_token_ids": list(prompts[i])} for i in asked],
                params,
                use_tqdm=False,
                lora_request=_lora_request(adapter),
            )
            duration_s = time.perf_counter() - start
        for i, output in zip(asked, outputs, strict=True):
            ids = list(output.outputs[0].token_ids)
            found[i] = finished(ids, engine=engine, ends=ends, stops=decoding.stop)
    return [found[i] for i in range(len(prompts))], duration_s


@contextmanager
def _loaded(**options: Any) -> Iterator[Any]:
    """Lend an engine, and take all of it off the card again."""
    os.environ.update(QUIET)
    vllm: Any = importlib.import_module("vllm")
    llm: Any = vllm.LLM(**options)
    try:
        yield llm
    finally:
        # Whoever was lent it still has the name; its process ends with its last reference, or here.
        core: Any = getattr(llm.llm_engine, "engine_core", None)
        if hasattr(core, "shutdown"):
            core.shutdown()
        del llm, core
        gc.collect()
        state: Any = importlib.import_module("vllm.distributed.parallel_state")
        state.cleanup_dist_env_and_memory()


def _options(
    base: Path, adapter: Path | None, *, precision: str, reads: bool, seed: int
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": str(base), "skip_tokenizer_init": not reads, "trust_remote_code": False,
        "dtype": DTYPES[precision], "seed": seed,
        # Else the base model's own sampling settings would fill in what is not said.
        "generation_config": "vllm",
    }  # fmt: skip
    if adapter is not None:
        rank = json.loads((adapter / "adapter_config.json").read_text("utf-8"))["r"]
        room = next(size for size in LORA_RANKS if size >= rank)
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
    return options


def _sampling(
    decoding: Decoding, ends: frozenset[int], room: int, *, seed: int, reads: bool
) -> Any:
    vllm: Any = importlib.import_module("vllm")
    return vllm.SamplingParams(
        temperature=decoding.temperature,
        top_p=decoding.top_p if decoding.temperature > 0 else 1.0,
        top_k=(decoding.top_k if decoding.temperature > 0 else 0) or -1,
        max_tokens=room,
        seed=seed,
        stop=list(decoding.stop) if reads else None,
        stop_token_ids=sorted(ends),
        detokenize=reads,
    )


def _lora_request(adapter: Path | None) -> Any:
    if adapter is None:
        return None
    request: Any = importlib.import_module("vllm.lora.request")
    return request.LoRARequest("expert", 1, str(adapter))


def _seed(prompt: Sequence[int], seed: int) -> int:
    digest = hashlib.sha256(seed_text(prompt, seed).encode()).digest()
    return int.from_bytes(digest[:N_SEED_BYTES], "big")


def _own_settings(base: Path) -> tuple[int | None, list[int]]:
    """Read how many positions a model has, and the tokens that end its texts."""
    config = json.loads((base / "config.json").read_text("utf-8"))
    text = config.get("text_config", config)
    path = base / "generation_config.json"
    settings = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    own = settings.get("eos_token_id")
    ends = [] if own is None else [own] if isinstance(own, int) else own
    return text.get("max_position_embeddings"), ends
