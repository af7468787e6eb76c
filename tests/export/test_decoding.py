"""The manifest's decoding settings, obeyed by who loads the exported model with transformers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_up_expert import SAMPLING, export
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from expertflow.evaluate.records import Decoding
from expertflow.export.model_files import set_decoding

PROMPT = torch.tensor([[5, 9, 40, 77]])


def exported(folder: Path, decoding: Decoding) -> GenerationConfig:
    export(folder, decoding, own_ends=[7, 8])
    return GenerationConfig.from_pretrained(folder)


def test_greedy_leaves_nothing_of_the_base_models_sampling(tmp_path: Path) -> None:
    settings = exported(tmp_path, Decoding())
    assert settings.do_sample is False and settings.stop_strings is None
    assert not settings.to_diff_dict().keys() & (SAMPLING.keys() - {"do_sample"})


def test_all_ends_are_there(tmp_path: Path) -> None:
    tokenizer = export(tmp_path, Decoding(), own_ends=[7, 8])
    end, text_end = (tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>"))
    settings = GenerationConfig.from_pretrained(tmp_path)
    assert settings.eos_token_id == sorted([end, text_end, 7, 8])
    assert settings.pad_token_id == text_end
    plain = SimpleNamespace(generation_config=GenerationConfig())
    set_decoding(plain, Decoding(), end_id=2, text_end_id=2)
    assert plain.generation_config.eos_token_id == 2


def test_sampling_settings_are_there(tmp_path: Path) -> None:
    settings = exported(tmp_path, Decoding(temperature=0.7, top_p=0.9, top_k=0, stop=("#", ";")))
    assert settings.do_sample and settings.stop_strings == ["#", ";"]
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.7, 0.9, 0)


def loaded(folder: Path, decoding: Decoding) -> tuple[Any, Any]:
    export(folder, decoding)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_generate_obeys_the_stop_texts(tmp_path: Path) -> None:
    model, tokenizer = loaded(tmp_path / "plain", Decoding())
    whole = model.generate(PROMPT, max_new_tokens=20)[0, 4:].tolist()
    text = tokenizer.decode(whole)
    stop = text[6:8]
    model, tokenizer = loaded(tmp_path / "stops", Decoding(stop=(stop,)))
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(PROMPT, max_new_tokens=20)
    written = model.generate(PROMPT, max_new_tokens=20, tokenizer=tokenizer)[0, 4:].tolist()
    assert len(written) < len(whole) and written == whole[: len(written)]
    assert stop in tokenizer.decode(written) and stop not in tokenizer.decode(written[:-1])


def test_generate_obeys_the_sampling_settings(tmp_path: Path) -> None:
    greedy = loaded(tmp_path / "greedy", Decoding())[0].generate(PROMPT, max_new_tokens=12)
    one = loaded(tmp_path / "one", Decoding(temperature=1.5, top_k=1))[0]
    many = loaded(tmp_path / "many", Decoding(temperature=1.5))[0]
    torch.manual_seed(0)
    assert torch.equal(one.generate(PROMPT, max_new_tokens=12), greedy)
    assert not torch.equal(many.generate(PROMPT, max_new_tokens=12), greedy)
