import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from expertflow.data.documents import Document
from expertflow.data.layout import chatml_layout
from expertflow.data.records import Body, Turn
from expertflow.evaluate.expert import choose, cut_at, shared_with_training
from expertflow.evaluate.generate import generate, pad_left
from expertflow.evaluate.records import EvaluationSpec
from expertflow.tokens.ragged import Ragged, ragged


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    return Qwen3ForCausalLM(config)


def answers(model: Qwen3ForCausalLM, prompts: list[list[int]], batch_size: int) -> list[list[int]]:
    return generate(model, prompts, end_id=1, pad_id=0, max_new_tokens=12, batch_size=batch_size)


def test_a_batch_answers_as_each_prompt_alone(model: Qwen3ForCausalLM) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 60, (n,), generator=generator).tolist() for n in (3, 9, 5, 1, 7)]
    alone = [answers(model, [prompt], 1)[0] for prompt in prompts]
    assert answers(model, prompts, 5) == alone
    assert answers(model, prompts, 2) == alone
    assert any(alone)


def test_padding_stands_on_the_left() -> None:
    ids, mask = pad_left([[5], [6, 7]], pad_id=0)
    assert ids.tolist() == [[0, 5], [6, 7]]
    assert mask.tolist() == [[0, 1], [1, 1]]


def test_an_answer_ends_before_the_first_stop_text() -> None:
    assert cut_at("a;b\n\nc", ("\n\n", ";")) == "a"
    assert cut_at("abc", ()) == "abc"


def document(row: int, text: str, *, held_out: bool) -> Document:
    turns = (
        Turn(role="user", content=text, learned=False),
        Turn(role="assistant", content=text.upper(), learned=True),
    )
    return Document(
        document_id=str(row),
        text_hash=text,
        body=Body(turns=turns),
        fields={},
        held_out=held_out,
        n_copies=1,
        row=row,
    )


def test_documents_on_both_sides_are_counted() -> None:
    texts = [("a", False), ("b", True), ("a", True)]
    found = [document(i, text, held_out=side) for i, (text, side) in enumerate(texts)]
    assert shared_with_training(found) == 1
    assert shared_with_training(found[:2]) == 0


class Letters:
    """An engine that gives each character an id."""

    def encode_flat(self, texts: list[str]) -> Ragged:
        return ragged([[ord(c) for c in text] for text in texts])

    def special_id(self, token: str) -> int:
        return {"<|im_start|>": 1, "<|im_end|>": 2}[token]


def test_a_question_ends_where_training_starts_to_learn() -> None:
    spec = EvaluationSpec(
        task="exact_match", max_examples=1, max_new_tokens=1, batch_size=1, stop=()
    )
    held = choose([document(0, "q", held_out=True)], spec, Letters(), chatml_layout())[0]  # type: ignore[arg-type]
    assert "".join(map(chr, held.prompt_ids)) == "\x01user\nq\x02\n\x01assistant\n"
    assert (held.example.prompt, held.example.reference) == ("q", "Q")
