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
from expertflow.evaluate.answer_text import cut_at
from expertflow.evaluate.generate import end_ids, positions_of
from expertflow.export.model_files import read_system_prompt
from expertflow.export.records import export_command
from expertflow.tokens.engine import Engine
from expertflow.tokens.tokenize import tokenize
from expertflow.train.model.load import load_base, plain_attention

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
        """Tokenize as in training, or only the last turn without a template."""
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
        """Stream an answer until Ctrl-C; raise ConfigError if no position is left for it."""
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
        with suppress(KeyboardInterrupt), torch.inference_mode():
            self.model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=settings,
                tokenizer=self.tokenizer,
                streamer=stream,
            )
        return stream.shown


class Stream(BaseStreamer):  # type: ignore[misc]
    """Shows an answer without its stop text; TextStreamer loses spaces with some tokenizers."""

    def __init__(self, engine: Engine, settings: GenerationConfig, show: Show) -> None:
        self.shown = ""
        self._engine, self._ends, self._show = engine, end_ids(settings), show
        self._stops = tuple(settings.stop_strings or ())
        self._ids: list[int] | None = None

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, which is not shown, in the first call, then each token."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += [i for i in value.reshape(-1).tolist() if i not in self._ends]
        # Held back: an incomplete character, and what may begin a stop text.
        text = self._decode().rstrip("\N{REPLACEMENT CHARACTER}")
        longest = max(map(len, self._stops), default=1)
        self._show_new(text[: len(text) - longest + 1])

    def end(self) -> None:
        self._show_new(self._decode())

    def _decode(self) -> str:
        return cut_at(self._engine.decode(self._ids or []), self._stops)

    def _show_new(self, text: str) -> None:
        if len(text) > len(self.shown):
            piece, self.shown = text[len(self.shown) :], text
            self._show(piece)


def load_expert(folder: Path, *, max_new_tokens: int) -> ServedExpert:
    """Load an exported model offline, on a card if there is one; raise ConfigError if missing."""
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens}: must be 1 or more")
    place = find_model(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if has_bf16 else torch.float32
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
