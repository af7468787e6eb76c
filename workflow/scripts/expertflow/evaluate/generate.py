"""Answer held-out questions in batches: Transformers generates, sampling and endings are ours."""

import logging
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from expertflow.core.errors import EvaluationError
from expertflow.core.progress import ProgressCounter, show_activity
from expertflow.core.records import Record
from expertflow.data.records import Layout
from expertflow.evaluate.answer_text import cut_at, without_thoughts
from expertflow.evaluate.records import Decoding, GenerationSpec
from expertflow.tokens.engine import Engine
from expertflow.train.device import is_out_of_memory
from expertflow.train.model.packed import causal_lm

log = logging.getLogger(__name__)
# Generation pads on the left and masks, which training's packed attention does not support.
ATTENTION = "sdpa"
# For families whose score modifications SDPA does not support.
PLAIN_ATTENTION = "eager"
# A stop text of n bytes ends in the last n tokens; a few more for tokens without text.
MARGIN_TOKENS = 8
Ids = list[list[int]]
T = TypeVar("T")


class Answer(Record, frozen=True):
    """``text`` omits thoughts and the terminator.

    ``ended`` is false if it ran out of room; ``not_asked`` says why it was not asked.
    """

    text: str
    ended: bool
    not_asked: str | None = None


class PromptCodec(Record, frozen=True):
    engine: Engine
    layout: Layout

    @property
    def end_id(self) -> int:
        return self.engine.special_id(self.layout.turn_end or self.layout.text_end)

    @property
    def pad_id(self) -> int:
        """The end-of-text token, which also pads prompts; it is masked."""
        return self.engine.special_id(self.layout.text_end)


def generate_answers(
    model: Any, prompts: Sequence[list[int]], codec: PromptCodec, spec: GenerationSpec
) -> list[Answer]:
    """Continue each prompt (token ids) to its end; answers keep the order of the prompts.

    An answer ends with the turn, the text, an end token of the model's own settings, a stop text,
    ``max_new_tokens``, or the model's last position. A prompt that leaves no position is skipped,
    with the reason in ``not_asked``.

    Sampling is seeded by the prompt, so an answer depends on its batch only by rounding, which
    almost never decides a token in fp32. In bf16 answers repeat only for the same card and batch
    size.

    Raises EvaluationError if a single prompt does not fit into memory.
    """
    lm, engine = causal_lm(model), codec.engine
    ends = end_ids(lm.generation_config, codec.end_id, codec.pad_id)
    n_positions, batch_size = positions_of(lm.config) or sys.maxsize, spec.batch_size
    rooms = [max(0, min(spec.max_new_tokens, n_positions - len(p))) for p in prompts]
    found: dict[int, Answer] = {}
    for i in (i for i, room in enumerate(rooms) if room == 0):
        why = f"the prompt's {len(prompts[i])} tokens leave no position for an answer"
        log.warning("not asked: %s", why)
        found[i] = Answer("", ended=False, not_asked=why)
    # Prompts of similar length share a batch, to reduce padding.
    waiting = sorted((i for i in range(len(prompts)) if rooms[i]), key=lambda i: len(prompts[i]))
    progress = ProgressCounter("answering", total=len(waiting), unit="questions")
    with (
        torch.inference_mode(),
        generation_mode(lm, ends=ends, pad_id=codec.pad_id),
        show_activity(progress.describe),
    ):
        while waiting:
            # A finished row keeps running alongside the others, and needs positions.
            most = n_positions - rooms[waiting[0]]
            chosen = [i for i in waiting[:batch_size] if len(prompts[i]) <= most]
            try:
                rows = _continued(
                    lm, [prompts[i] for i in chosen], [rooms[i] for i in chosen], engine, spec
                )
            except RuntimeError as error:
                advice = "lower evaluation.max_new_tokens, or use a larger card"
                batch_size = halve_batch(len(chosen), error, advice)
                continue
            for i, row in zip(chosen, rows, strict=True):
                asked = engine.decode(prompts[i])
                found[i] = finish_answer(row, asked, engine, ends=ends, stops=spec.decoding.stop)
            del waiting[: len(chosen)]
            progress.add(len(chosen))
    return [found[i] for i in range(len(prompts))]


def positions_of(config: Any) -> int | None:
    """Return the model's number of positions; null if its configuration does not say."""
    n: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return n


def end_ids(config: Any, *more: int) -> frozenset[int]:
    """Return the end tokens of a generation config (none, one or several), plus ``more``."""
    own = getattr(config, "eos_token_id", None)
    own = [] if own is None else [own] if isinstance(own, int) else own
    return frozenset({*own, *more})


def finish_answer(
    ids: list[int], prompt: str, engine: Engine, *, ends: frozenset[int], stops: tuple[str, ...]
) -> Answer:
    """Cut generated ids at an end token or stop text, and drop the thoughts."""
    end = next((i for i, token in enumerate(ids) if token in ends), None)
    text = engine.decode(ids[:end])
    stopped = any(stop in text for stop in stops)
    answer = without_thoughts(cut_at(text, stops), prompt)
    return Answer(answer, ended=stopped or end is not None)


def halve_batch(n_rows: int, error: RuntimeError, advice: str = "use a larger card") -> int:
    """Return half of a batch that ran out of memory; re-raise for one row or another error."""
    if not is_out_of_memory(error):
        raise error
    if n_rows == 1:
        raise EvaluationError(f"out of memory with one question at a time; {advice}") from error
    # The error's traceback would keep the batch's tensors alive.
    traceback.clear_frames(error.__traceback__)
    torch.cuda.empty_cache()
    log.warning(
        "out of memory with %d questions at a time; continuing with %d", n_rows, n_rows // 2
    )
    return n_rows // 2


def shrink_batches(run: Callable[[int], T], batch_size: int) -> T:
    while True:
        try:
            return run(batch_size)
        except RuntimeError as error:
            batch_size = halve_batch(batch_size, error)


@contextmanager
def generation_mode(lm: PreTrainedModel, *, ends: frozenset[int], pad_id: int) -> Iterator[None]:
    """Set the attention and decoding settings that generation needs, then restore the model's own.

    Transformers fills missing settings from the model's own, e.g. a repetition penalty, which the
    exported expert does not have.
    """
    attention, config = lm.config._attn_implementation, lm.generation_config
    lm.set_attn_implementation(ATTENTION if lm._supports_sdpa else PLAIN_ATTENTION)
    lm.generation_config = GenerationConfig(
        eos_token_id=sorted(ends), pad_token_id=pad_id, do_sample=False, use_cache=True
    )
    try:
        yield
    finally:
        lm.generation_config = config
        lm.set_attn_implementation(attention)


def _continued(
    lm: PreTrainedModel, prompts: Ids, rooms: list[int], engine: Engine, spec: GenerationSpec
) -> Ids:
    """Return the ids that follow each prompt, at most its room, padded to equal length."""
    config, rows = lm.generation_config, [torch.tensor(prompt) for prompt in prompts]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")  # [B, L]
    ids, mask = pad(rows, padding_value=config.pad_token_id), pad(list(map(torch.ones_like, rows)))
    longest = ids.shape[1]
    processors = LogitsProcessorList()
    if spec.decoding.temperature > 0:
        processors.append(Draws(spec.decoding, prompts, spec.seed))
    endings = Endings(longest, rooms, engine, spec.decoding.stop)
    out = lm.generate(
        input_ids=ids.to(lm.device),
        attention_mask=mask.to(lm.device),
        generation_config=GenerationConfig(
            **{**config.to_diff_dict(), "max_new_tokens": max(rooms)}
        ),
        logits_processor=processors,
        stopping_criteria=StoppingCriteriaList([endings]),
    )
    return [row[:room] for row, room in zip(out[:, longest:].tolist(), rooms, strict=True)]


class Draws(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, decoding: Decoding, prompts: list[list[int]], seed: int) -> None:
        self.warpers: list[Any] = [TemperatureLogitsWarper(decoding.temperature)]
        if decoding.top_k:
            self.warpers.append(TopKLogitsWarper(decoding.top_k))
        if decoding.top_p < 1:
            self.warpers.append(TopPLogitsWarper(decoding.top_p))
        # Seeded by the question's text, so that no other question changes its draws.
        texts = (f"{seed}:{','.join(map(str, prompt))}" for prompt in prompts)
        self.generators = [random.Random(text) for text in texts]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [B, V], minus infinity for all but the drawn token."""
        warped = scores.float()
        for warper in self.warpers:
            warped = warper(input_ids, warped)
        sums = warped.double().softmax(-1).cumsum(-1)
        # Inverse transform sampling: the first token whose cumulative probability exceeds u.
        uniform = [[generator.random()] for generator in self.generators]
        places = torch.tensor(uniform, dtype=sums.dtype, device=sums.device) * sums[:, -1:]
        # right=True never draws a token of probability 0, even if u is 0.
        chosen = torch.searchsorted(sums, places, right=True).clamp_(max=sums.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class Endings(StoppingCriteria):  # type: ignore[misc]
    """Find rows that are out of room or wrote a stop text, which may span tokens."""

    def __init__(
        self, start: int, rooms: list[int], engine: Engine, stops: tuple[str, ...]
    ) -> None:
        self.start, self.rooms, self.engine, self.stops = start, rooms, engine, stops
        self.n_tail = max((len(stop.encode()) for stop in stops), default=0) + MARGIN_TOKENS
        self.done = [False] * len(rooms)

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Return one flag per row, [B]."""
        n_written = input_ids.shape[1] - self.start
        rows = input_ids[:, self.start :].tolist() if self.stops else []
        for i, room in enumerate(self.rooms):
            if not self.done[i] and rows:
                # Check the tail first, as decoding everything after each token is quadratic; then
                # everything, because the tail may start within a character.
                self.done[i] = self._has_stop(rows[i][-self.n_tail :]) and self._has_stop(rows[i])
            self.done[i] |= n_written >= room
        return torch.tensor(self.done, device=input_ids.device)

    def _has_stop(self, ids: list[int]) -> bool:
        text = self.engine.decode(ids)
        return any(stop in text for stop in self.stops)
