"""A stand-in for an OpenAI-compatible server on loopback: Chat Completions with tool calls, refusals, broken answers.

It is as strict as the strictest of them: every call is answered by one tool message, right after it; no user speaks between
a tool and the model; arguments that come back are JSON; a newer model of OpenAI's refuses `max_tokens`.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.messages_api import Answer, Broken, Call, Refusal, tokens


class ChatApi(ThreadingHTTPServer):
    """answer(request) -> Answer | Refusal | Broken | dict says what the model does."""

    daemon_threads = True

    def __init__(self, answer: Callable[[dict], Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.requests: list[dict] = []
        self.keys: list[str] = []
        self.usages: list[dict] = []
        self.counts, self.newer = True, False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def complaint(self, request: dict) -> str:
        """Why a server would refuse this request; empty if it would not."""
        if self.newer and "max_tokens" in request:
            return (
                "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
            )
        messages = request["messages"]
        roles = [message["role"] for message in messages]
        if roles[:2] != ["system", "user"] or not all(isinstance(m["content"], str) for m in messages):
            return f"these roles cannot be: {roles}"
        for number, message in enumerate(messages[1:], 1):
            before, calls = messages[number - 1], message.get("tool_calls", [])
            if message["role"] == "user" and before["role"] not in ("system", "assistant"):
                return f"a user after {before['role']}"
            if message["role"] == "user" and before.get("tool_calls"):
                return "calls without an answer"
            answered = [m.get("tool_call_id") for m in messages[number + 1 : number + 1 + len(calls)]]
            if [call["id"] for call in calls] != answered:
                return f"calls {calls} are answered by {answered}"
            for call in calls:
                json.loads(call["function"]["arguments"])
        return ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.requests.append(request)
        server.keys.append(self.headers["Authorization"])
        if self.path != "/v1/chat/completions":
            self._send(200, "<html>a page</html>", {"Content-Type": "text/html"})
            return
        complaint = server.complaint(request)
        answer = Refusal(400, "invalid_request_error") if complaint else server.answer(request)
        if isinstance(answer, Refusal):
            error = {"message": complaint or answer.kind, "type": answer.kind}
            self._send(answer.status, json.dumps({"error": error}), answer.headers)
        elif isinstance(answer, Broken):
            self._break(answer.how)
        elif isinstance(answer, dict):  # as it is
            self._send(200, json.dumps(answer))
        else:
            self._send(200, json.dumps(self._completion(request, answer)))

    def _break(self, how: str) -> None:
        if how == "stalled":
            time.sleep(5)
        if how == "endless":
            self._send(200, " ", {"Content-Length": "100000"})
            with suppress(ConnectionError):
                for _ in range(100):
                    time.sleep(0.05)
                    self.wfile.write(b" ")
        elif how == "an error under 200":
            self._send(200, json.dumps({"error": {"message": "provider is busy"}}))
        else:
            self._send(200, '{"choices": [', {} if how == "no JSON" else {"Content-Length": "1000"})
        self.close_connection = True

    def _completion(self, request: dict, answer: Answer) -> dict:
        number = len(self.server.requests)
        message: dict[str, Any] = {"role": "assistant", "content": None, "reasoning_content": "a thought"}
        for index, block in enumerate(answer.blocks):
            if isinstance(block, Call):
                text = block.input if isinstance(block.input, str) else json.dumps(block.input)
                call = {"id": f"call_{number}_{index}", "type": "function"}
                message.setdefault("tool_calls", []).append(call | {"function": {"name": block.name, "arguments": text}})
            else:
                message["content"] = (message["content"] or "") + block
        ended = {"max_tokens": "length"}.get(answer.stop_reason) or ("tool_calls" if "tool_calls" in message else "stop")
        usage = {"prompt_tokens": tokens(request["messages"]) + tokens(request["tools"])}
        usage["completion_tokens"] = answer.thought_tokens + tokens(message)
        usage["total_tokens"] = sum(usage.values())
        self.server.usages.append(usage)
        choice = {"index": 0, "message": message, "finish_reason": ended, "logprobs": None}
        completion = {"id": f"chat_{number}", "object": "chat.completion", "created": 0, "model": request["model"]}
        return completion | {"choices": [choice]} | ({"usage": usage} if self.server.counts else {})

    def _send(self, status: int, body: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        all_headers = {"Content-Type": "application/json", "Content-Length": str(len(body.encode()))} | (headers or {})
        for name, value in all_headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())


@contextmanager
def serving(answer: Callable[[dict], Any]) -> Iterator[ChatApi]:
    with ChatApi(answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
