"""A stand-in for Anthropic's Messages API on loopback: streams, calls tools, caches prefixes, refuses, fails.

What it checks and counts follows platform.claude.com/docs (November 2026): forced tool use and switched-off thinking are
refused, as for Claude Opus 5.5; thinking blocks must come back as they were; every call of a tool is answered at the
start of the next message; there are four cache breakpoints at most; a prefix stays cached for five minutes after its use.
Tokens are estimated from bytes: no tokenizer of Claude's is public.
"""

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BYTES_PER_TOKEN = (
    2.7  # 3.5 characters a token (Anthropic's glossary), and 30 % more tokens since the tokenizer of Claude 4.7
)
CACHE_S, LEAST_CACHED, LOOK_BACK, BREAKPOINTS = 300.0, 512, 20, 4


@dataclass(frozen=True)
class Call:
    """A call of a tool; an input that is text is streamed as it is, which may be no JSON."""

    name: str
    input: Any


@dataclass(frozen=True)
class Answer:
    """What the model says. Of its thought only the number of tokens is seen."""

    blocks: tuple[str | Call, ...]
    thought_tokens: int = 0
    stop_reason: str = ""


@dataclass(frozen=True)
class Refusal:
    """An HTTP error instead of an answer."""

    status: int
    kind: str = "overloaded_error"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Broken:
    """An answer whose stream does not come to its end, `after` so many events."""

    how: str  # "cut": the connection; "ended": the stream; "stalled": silence; "overloaded": an error event
    after: int = 2


def said(*blocks: str | Call, thought_tokens: int = 0, stop_reason: str = "") -> Answer:
    return Answer(blocks, thought_tokens, stop_reason)


def tokens(value: Any) -> int:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return math.ceil(len(text.encode()) / BYTES_PER_TOKEN)


class MessagesApi(ThreadingHTTPServer):
    """answer(request) -> Answer | Refusal | Broken says what the model does; now() is the clock that the cache goes by."""

    daemon_threads = True

    def __init__(self, answer: Callable[[dict], Any], now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.now = answer, now
        self.requests: list[dict] = []
        self.usages: list[dict] = []
        self.cache: dict[str, float] = {}  # hash of a prefix -> when it was last used
        self.thoughts: dict[str, list] = {}  # signature -> the content that it came in

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def usage(self, request: dict) -> dict[str, int]:
        """Tokens of a prompt: read from the cache, written to it, and neither. What is marked is cached from now on."""
        blocks = [(request.get("tools", []), False)]
        for block in [*request.get("system", []), *(b for m in request["messages"] for b in m["content"])]:
            plain = {k: v for k, v in block.items() if k != "cache_control"}
            blocks.append((plain, "cache_control" in block))
        digest, total, prefixes = hashlib.sha256(request["model"].encode()), 0, []
        for block, marked in blocks:
            digest.update(json.dumps(block, sort_keys=True).encode())
            total += tokens(block)
            prefixes.append((digest.hexdigest(), total, marked))
        marks = [i for i, (_, _, marked) in enumerate(prefixes) if marked]
        now, read = self.now(), 0
        for mark in marks:
            for key, size, _ in prefixes[max(0, mark - LOOK_BACK) : mark + 1]:
                if self.cache.get(key, -math.inf) >= now - CACHE_S and size >= LEAST_CACHED:
                    read = max(read, size)
                    self.cache[key] = now
        self.cache |= {prefixes[mark][0]: now for mark in marks}
        written = max(0, max((prefixes[mark][1] for mark in marks), default=0) - read)
        fresh = total - read - written
        return {"input_tokens": fresh, "cache_creation_input_tokens": written, "cache_read_input_tokens": read}

    def complaint(self, request: dict) -> str:
        """Why the API would refuse this request; empty if it would not."""
        messages = request["messages"]
        marks = json.dumps(request).count('"cache_control"')
        if request.get("tool_choice", {}).get("type") in ("any", "tool"):
            return "forced tool use is not supported for this model"
        if request.get("thinking", {}).get("type") in ("disabled", "enabled"):
            return "thinking cannot be set for this model"
        if marks > BREAKPOINTS:
            return f"{marks} cache breakpoints, {BREAKPOINTS} are allowed"
        if [m["role"] for m in messages] != [("user", "assistant")[i % 2] for i in range(len(messages))]:
            return "roles must alternate, from user to user"
        for message, following in zip(messages[1::2], messages[2::2]):
            calls = [b["id"] for b in message["content"] if b["type"] == "tool_use"]
            answered = [b.get("tool_use_id") for b in following["content"][: len(calls)]]
            if not message["content"] or calls != answered:
                return f"calls {calls} are answered by {answered}"
            for block in message["content"]:
                if block["type"] == "thinking" and not self._thought(block.get("signature"), message["content"]):
                    return "thinking blocks must come back as they were"
                if block["type"] == "tool_use" and not isinstance(block["input"], dict):
                    return "the input of a tool must be an object"
        return ""

    def _thought(self, signature: str, content: list) -> bool:
        """Whether this is the content that was sent with a thought; of an input that was no JSON, whatever was made."""
        sent = self.thoughts.get(signature, [])
        raw = [isinstance(block.get("input"), str) for block in sent]
        return len(sent) == len(content) and all(r or a == b for r, a, b in zip(raw, sent, content))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        complaint = self.server.complaint(request)
        answer = Refusal(400, "invalid_request_error") if complaint else self.server.answer(request)
        if isinstance(answer, Refusal):
            self._refuse(answer, complaint or "busy")
            return
        usage = self.server.usage(request)
        self._head(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
        broken = answer if isinstance(answer, Broken) else None
        events = self._events(request, said("a thought that does not end") if broken else answer, usage)
        for number, event in enumerate(events):
            if broken and number == broken.after:
                self._break(broken.how)
                return
            self._send(event)
        self.wfile.write(b"0\r\n\r\n")

    def _break(self, how: str) -> None:
        if how == "stalled":
            time.sleep(5)
        if how == "overloaded":
            self._send({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}})
        if how in ("ended", "overloaded"):
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _refuse(self, refusal: Refusal, words: str) -> None:
        body = json.dumps({"type": "error", "error": {"type": refusal.kind, "message": words}}).encode()
        self._head(refusal.status, {"Content-Type": "application/json", "Content-Length": len(body), **refusal.headers})
        self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, Any]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def _send(self, event: dict) -> None:
        data = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _events(self, request: dict, answer: Answer, usage: dict[str, int]) -> Iterator[dict]:
        number = len(self.server.requests)
        head = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": request["model"], "content": []}
        head |= {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": head | {"usage": usage | {"output_tokens": 1}}}
        signature = hashlib.sha256(json.dumps(request["messages"]).encode()).hexdigest()
        content: list[dict] = [{"type": "thinking", "thinking": "", "signature": signature}]
        yield {"type": "content_block_start", "index": 0, "content_block": {**content[0], "signature": ""}}
        yield {"type": "ping"}
        yield _delta(0, {"type": "signature_delta", "signature": signature})
        yield {"type": "content_block_stop", "index": 0}
        for index, block in enumerate(answer.blocks, start=1):
            if isinstance(block, str):
                content.append({"type": "text", "text": block})
                yield {"type": "content_block_start", "index": index, "content_block": {"type": "text", "text": ""}}
                yield _delta(index, {"type": "text_delta", "text": block})
            else:
                call = {"type": "tool_use", "id": f"toolu_{number}_{index}", "name": block.name, "input": {}}
                yield {"type": "content_block_start", "index": index, "content_block": call}
                text = block.input if isinstance(block.input, str) else json.dumps(block.input)
                for part in (text[: len(text) // 2], text[len(text) // 2 :]):
                    yield _delta(index, {"type": "input_json_delta", "partial_json": part})
                content.append(call | {"input": block.input})
            yield {"type": "content_block_stop", "index": index}
        self.server.thoughts[signature] = content
        calls = any(isinstance(block, Call) for block in answer.blocks)
        stop = {"stop_reason": answer.stop_reason or ("tool_use" if calls else "end_turn"), "stop_sequence": None}
        out = {"output_tokens": answer.thought_tokens + sum(tokens(block) for block in content)}
        self.server.usages.append(usage | out)
        yield {"type": "message_delta", "delta": stop, "usage": out}
        yield {"type": "message_stop"}


def _delta(index: int, delta: dict) -> dict:
    return {"type": "content_block_delta", "index": index, "delta": delta}


@contextmanager
def serving(answer: Callable[[dict], Any], now: Callable[[], float] = time.monotonic) -> Iterator[MessagesApi]:
    with MessagesApi(answer, now) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
