"""Chat with an exported expert in the terminal, with the prompts and decoding of its evaluation."""

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from expertflow.core.errors import ConfigError
from expertflow.core.records import Record
from expertflow.data.layout import read_layout
from expertflow.data.records import Body, Layout, Segment, Turn
from expertflow.data.reject import Reject
from expertflow.data.render import Renderer, split_question
from expertflow.evaluate.answer_text import THINK, cut_at, without_thoughts
from expertflow.evaluate.generate import end_ids, positions_of
from expertflow.export.model_files import read_system_prompt
from expertflow.export.records import export_command
from expertflow.tokens.engine import Engine
from expertflow.tokens.tokenize import tokenize
from expertflow.train.model.load import load_base, plain_attention

# The first cards with bf16 (Ampere).
BF16_CAPABILITY = (8, 0)
HELP = "/reset clears the chat, /quit exits, Ctrl-C stops an answer"
Show = Callable[[str], None]


class ServedExpert(Record, frozen=True):
    name: str
    model: PreTrainedModel
    engine: Engine
    tokenizer: Any
    layout: Layout
    system_prompt: str | None = None

    def prompt_ids(self, turns: list[Turn]) -> list[int]:
        """Tokenize as in training, or only the last turn without a template.

        Raise ConfigError if the text is not UTF-8 or the template rejects the chat.
        """
        try:
            "".join(turn.content for turn in turns).encode()
        except UnicodeEncodeError as error:
            raise ConfigError("the text is not UTF-8; convert it, e.g. with iconv") from error
        if self.layout.chat_template is None or self.layout.problem is not None:
            start = self.layout.text_start
            opening = [Segment(start, special=True)] if start else []
            segments = (*opening, Segment(turns[-1].content))
        else:
            # Any answer shows where answers begin.
            body = Body(turns=(*turns, Turn(role="assistant", content="x", learned=True)))
            try:
                segments, _answer = split_question(Renderer(self.layout), body)
            except Reject as reject:
                message = f"the model's chat template rejects this chat: {reject}"
                raise ConfigError(message) from reject
        ids: list[int] = tokenize([segments], self.engine).ids[0].tolist()
        return ids

    def generate_answer(self, turns: list[Turn], show: Show) -> str:
        """Stream an answer until Ctrl-C; raise ConfigError if positions or memory run out."""
        ids = self.prompt_ids(turns)
        settings = copy.deepcopy(self.model.generation_config)
        n_positions = positions_of(self.model.config)
        if n_positions is not None:
            settings.max_new_tokens = min(settings.max_new_tokens, n_positions - len(ids))
            if settings.max_new_tokens <= 0:
                raise ConfigError(
                    f"the prompt has {len(ids)} tokens and the model {n_positions} positions;"
                    " shorten it, or start over with /reset"
                )
        stream = Stream(self.engine, settings, show)
        prompt = torch.tensor([ids], device=self.model.device)
        try:
            with suppress(KeyboardInterrupt), torch.inference_mode():
                self.model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    generation_config=settings,
                    tokenizer=self.tokenizer,
                    streamer=stream,
                )
        except torch.OutOfMemoryError as error:
            message = f"the card has too little memory for a chat of {len(ids)} tokens and more"
            raise ConfigError(f"{message}; shorten it, or start over with /reset") from error
        stream.end()
        return stream.shown


class Stream(BaseStreamer):  # type: ignore[misc]
    """Shows an answer as scored; TextStreamer loses spaces with some tokenizers."""

    def __init__(self, engine: Engine, settings: GenerationConfig, show: Show) -> None:
        self.shown = self._opened = ""
        self._engine, self._ends, self._show = engine, end_ids(settings), show
        self._stops = tuple(settings.stop_strings or ())
        self._ids: list[int] | None = None

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt in the first call, then each token."""
        if self._ids is None:
            prompt = self._engine.decode(value.reshape(-1).tolist())
            # Templates of reasoning models open the thinking block.
            self._opened = THINK if prompt.rstrip().endswith(THINK) else ""
            self._ids = []  # the prompt is not shown
            return
        self._ids += [i for i in value.reshape(-1).tolist() if i not in self._ends]
        self._emit(final=False)

    def end(self) -> None:
        self._emit(final=True)

    def _emit(self, *, final: bool) -> None:
        text = self._opened + self._engine.decode(self._ids or [])
        text = cut_visible(text, self._stops, final=final)
        # Held back while a character is incomplete, because the text may still change.
        if len(text) > len(self.shown):
            piece, self.shown = text[len(self.shown) :], text
            self._show(piece)


def cut_visible(text: str, stops: tuple[str, ...], *, final: bool) -> str:
    """Return the visible part of a partial answer: no thoughts, no (possible) stop text."""
    is_stopped = any(stop in text for stop in stops)
    text = cut_at(text, stops)
    if not is_stopped and not final:
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        # "</s>": "<", "</", "</s".
        starts = {stop[:n] for stop in stops for n in range(1, len(stop))}
        text = text[: len(text) - max((len(s) for s in starts if text.endswith(s)), default=0)]
    begun, answer = text.lstrip(), without_thoughts(text)
    if not final and (THINK.startswith(begun) or (begun.startswith(THINK) and answer == text)):
        return ""
    return answer


def load_expert(folder: Path, *, max_new_tokens: int) -> ServedExpert:
    """Load an exported model offline, on a card if there is one; raise ConfigError if missing."""
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens}: must be 1 or more")
    place = find_model(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = device.type == "cuda" and torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    dtype = torch.bfloat16 if half else torch.float32
    model = load_base(str(place), dtype=dtype, attention_name=plain_attention(place))
    model = model.to(device).eval()
    model.generation_config.max_new_tokens = max_new_tokens
    return ServedExpert(
        name=folder.resolve().name,
        model=model,
        engine=Engine(place),
        # AutoTokenizer would ask on standard input whether to run a tokenizer's custom code.
        tokenizer=PreTrainedTokenizerFast.from_pretrained(place, local_files_only=True),
        layout=read_layout(place, choice="auto", text_special_tokens="plain"),
        system_prompt=read_system_prompt(place),
    )


def find_model(folder: Path) -> Path:
    for place in (folder / "merged", folder):
        if (place / "config.json").is_file():
            return place
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{folder}: an adapter without its base; pass the expert's folder")
    raise ConfigError(f"{folder}: no exported model here; make one with: {export_command(folder)}")


def answer_once(expert: ServedExpert, system: str | None, text: str, show: Show) -> None:
    if not text.strip():
        raise ConfigError("nothing to answer; pass --prompt, or text on standard input")
    expert.generate_answer(
        [*_opening(expert, system), Turn(role="user", content=text, learned=False)], show
    )
    show("\n")


def run_chat(
    expert: ServedExpert, system: str | None, *, read: Callable[[], str], show: Show
) -> None:
    """Answer each line, with the conversation as context, until /quit or the end of the input."""
    turns = _opening(expert, system)
    while True:
        try:
            text = read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            show(f"\n{HELP}\n")
            continue
        if text == "/quit":
            return
        if text == "/reset":
            turns = _opening(expert, system)
        elif text:
            asked = [*turns, Turn(role="user", content=text, learned=False)]
            try:
                answer = expert.generate_answer(asked, show)
            except ConfigError as error:
                show(f"error: {error}\n")
                continue
            show("\n")
            turns = [*asked, Turn(role="assistant", content=answer, learned=False)]


def _opening(expert: ServedExpert, system: str | None) -> list[Turn]:
    """Return the system prompt as the first turn; null: the expert's, empty: none."""
    content = expert.system_prompt if system is None else system
    return [Turn(role="system", content=content, learned=False)] if content else []
