"""A fake chat-completions endpoint on loopback."""

import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from loopback_hub import JsonHandler, listening


@dataclass
class Asked:
    """One request as the server saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def text(self) -> str:
        return "\n".join(message["content"] for message in self.body["messages"])

    def answer(self, name: str) -> str:
        """Return the text between the marks of ``answer A`` or ``answer B``."""
        found = re.search(rf"<<<answer {name} (\w+)>>>\n(.*?)\n<<<end \1>>>", self.text, re.DOTALL)
        assert found is not None
        return found[2]


@dataclass
class Response:
    """A status, headers and a body, or a verdict; ``endless`` repeats bytes, or hangs if empty."""

    content: str = '{"winner": "tie"}'
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    endless: bytes | None = None


Answering = Callable[[Asked], Response]


@dataclass
class Stub:
    endpoint: str
    asked: list[Asked]


@contextmanager
def judge_server(answering: Answering, certificate: ssl.SSLContext | None = None) -> Iterator[Stub]:
    asked: list[Asked] = []
    stop = threading.Event()

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            request = Asked(self.path, dict(self.headers), json.loads(self.rfile.read(length)))
            asked.append(request)
            answer = answering(request)
            while answer.endless is not None and not stop.wait(0.05):
                self.wfile.write(answer.endless)
            body = answer.body
            if body is None:
                message = {"role": "assistant", "content": answer.content}
                usage = {"prompt_tokens": 100, "completion_tokens": 10}
                body = json.dumps({"choices": [{"message": message}], "usage": usage}).encode()
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(body)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    with listening(Handler, certificate) as address:
        try:
            yield Stub(f"{address}/v1", asked)
        finally:
            stop.set()
