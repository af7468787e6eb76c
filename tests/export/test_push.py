"""Pushing an expert to a mock hub; the token appears nowhere."""

import base64
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback_hub import JsonHandler, listening
from support import run_script

from expertflow.core.errors import ConfigError
from expertflow.core.records import seal
from expertflow.core.sidecars import write_sidecar
from expertflow.export.push import find_files

TOKEN = "hf_secretsecret"
STEP = "steps/step-00000020"
FILES = {
    "README.md": "card\n", "config.json": "{}", "model.safetensors": "weights",
    "additional_chat_templates/tool_use.jinja": "tools",
}  # fmt: skip


class WriteHub(JsonHandler):
    """As much of the hub as a commit of small files needs."""

    requests: list[tuple[str, str | None, list[Any]]]
    endpoint: str
    refuses = False
    there: tuple[str, ...] = ()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        lines = [json.loads(line) for line in body.splitlines()]
        self.requests.append((self.path, self.headers.get("Authorization"), lines))
        place = f"http://{self.headers['Host']}/you/mine"
        answer: dict[str, Any] = {"url": place, "commitUrl": f"{place}/commit/1", "commitOid": "1"}
        if "/preupload/" in self.path:
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": f["path"], **modes} for f in lines[0]["files"]]}
        self.send_json(answer, status=403 if self.refuses else 200)

    def do_GET(self) -> None:
        if "/models/you/mine/tree/main" not in self.path:
            self.send_json({}, status=404)
            return
        self.send_json([{"type": "file", "path": p, "size": 1, "oid": "1"} for p in self.there])


@pytest.fixture
def hub() -> Iterator[type[WriteHub]]:
    handler = type("Bound", (WriteHub,), {"requests": []})
    with listening(handler) as handler.endpoint:
        yield handler


@pytest.fixture
def results(tmp_path: Path) -> Path:
    results = tmp_path / "mine"
    (results / "merged" / "additional_chat_templates").mkdir(parents=True)
    (results / "checkpoint" / STEP).mkdir(parents=True)
    for name, text in FILES.items():
        (results / "merged" / name).write_text(text)
    (results / "merged" / ".snakemake_timestamp").touch()
    (results / "merged" / ".adapter_card.md").write_text("card of the adapter w20")
    for place in (".", STEP):
        (results / "checkpoint" / place / "adapter_model.safetensors").write_text(place)
        (results / "checkpoint" / place / "adapter_config.json").write_text("{}")
    published = {"step": 20, "path": STEP, "weights_sha256": "w20", "reason": "r"}
    (results / "evaluation.json").write_text(json.dumps(seal({"published": published})))
    write_base(results, "Qwen/Qwen3-0.6B", "hub")
    return results


def write_base(results: Path, name: str, kind: str) -> None:
    (results / "model.json").write_text(json.dumps({"name": name, "kind": kind}))


def push(hub: Any, results: Path, *words: str, token: str | None = TOKEN) -> Any:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(results.parent)}
    own |= {"HF_TOKEN": token} if token else {}
    words = ("--repository", "you/mine", *words)
    done = run_script("push_expert", results, *words, env={**clean, **own})
    assert TOKEN not in done.stdout + done.stderr
    return done


def uploaded(hub: Any) -> dict[str, str]:
    [lines] = [lines for path, _, lines in hub.requests if "/commit/" in path]
    files = [line["value"] for line in lines if line["key"] == "file"]
    return {f["path"]: base64.b64decode(f["content"]).decode() for f in files}


# The files of an earlier push, of which another's weights would still be loaded.
EARLIER = (
    ".gitattributes", "LICENSE", "README.md", "adapter_config.json", "adapter_model.safetensors",
    "config.json", "eval/model.safetensors", "model-00001-of-00002.safetensors",
    "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip


def removed(hub: Any, done: Any) -> list[str]:
    lines = hub.requests[-1][2]
    names = [line["value"]["path"] for line in lines if line["key"] == "deletedFile"]
    assert ", ".join(names) in done.stderr
    return names


@pytest.mark.parametrize("words", [(), ("--public",)])
def test_the_merged_model_is_pushed_with_its_card(
    hub: Any, results: Path, words: tuple[str, ...]
) -> None:
    hub.there = EARLIER
    done = push(hub, results, *words)
    assert done.returncode == 0, done.stderr
    assert removed(hub, done) == [*EARLIER[3:5], EARLIER[7], EARLIER[9]]
    assert done.stdout == f"pushed: {hub.endpoint}/you/mine/commit/1\n"
    assert uploaded(hub) == FILES
    path, token, [created] = hub.requests[0]
    assert (path, token) == ("/api/repos/create", f"Bearer {TOKEN}")
    visibility = "public" if words else "private"
    assert created == {"name": "mine", "organization": "you", "visibility": visibility}


def test_the_published_adapter_is_pushed_with_its_own_card(hub: Any, results: Path) -> None:
    (results / "merged" / "tokenizer.json").write_text("tokens")
    hub.there = EARLIER
    done = push(hub, results, "--adapter")
    assert done.returncode == 0, done.stderr
    assert removed(hub, done) == [EARLIER[5], *EARLIER[7:]]
    found = uploaded(hub)
    assert found.pop("adapter_config.json")
    assert found == {
        "README.md": "card of the adapter w20", "adapter_model.safetensors": STEP,
        "additional_chat_templates/tool_use.jinja": "tools", "tokenizer.json": "tokens",
    }  # fmt: skip


@pytest.mark.parametrize("words", [(), ("--adapter",)])
def test_only_a_card_may_be_edited(hub: Any, results: Path, words: tuple[str, ...]) -> None:
    for name in ("training.json", "export.json"):
        (results / name).write_text("{}")
    merged = results / "merged"
    write_sidecar(results / "export.json", spec="{}", code="c", files=[merged])
    (merged / "README.md").write_text("card without the question\n")
    (merged / ".adapter_card.md").write_text("the same of the adapter w20")
    (merged / ".ipynb_checkpoints").mkdir()
    (merged / ".ipynb_checkpoints" / "README-checkpoint.md").write_text(FILES["README.md"])
    done = push(hub, results, *words)
    assert done.returncode == 0, done.stderr
    found = uploaded(hub)
    assert (
        "same" in found["README.md"]
        if words
        else found == FILES | {"README.md": "card without the question\n"}
    )
    assert not [name for name in found if "checkpoints" in name]
    (merged / "config.json").write_text("{1}")
    assert "config.json: does not match" in push(hub, results, *words).stderr


def test_an_expert_that_cannot_be_pushed_is_one_line(
    hub: Any, results: Path, tmp_path: Path
) -> None:
    def refused(*words: str, folder: Path = results, **how: Any) -> str:
        done = push(hub, folder, *words, **how)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        return str(done.stderr)

    assert "no exported model here" in refused(folder=tmp_path / "none")
    with contextlib.chdir(tmp_path), pytest.raises(ConfigError, match=f"/{tmp_path.name}/export"):
        find_files(Path(), adapter=False)
    assert "use owner/name" in refused("--repository", "a/b/c")
    card = results / "merged" / ".adapter_card.md"
    card.write_text("w10")
    assert "no card for the adapter in" in refused("--adapter")
    card.unlink()
    assert "export again: snakemake" in refused("--adapter")
    for base, kind in (("~/models/mine", "local"), ("builtin:tiny-qwen3", "builtin")):
        write_base(results, base, kind)
        message = f"its base {base} is on this machine only; omit --adapter"
        assert message in refused("--adapter")
    assert hub.requests == []
    assert "no token" in refused(token=None)
    hub.refuses = True
    assert "the hub refused it (403)" in refused()
    hub.endpoint = "http://127.0.0.1:9"
    assert "cannot be reached" in refused()
