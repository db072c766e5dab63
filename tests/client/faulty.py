"""A SGLang made of sockets: answers rightly, until it is told to go wrong in some way once."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

INFO = {"model_path": "tiny", "weight_version": "default", "preferred_sampling_params": None}
SERVER = {
    "version": "0.5.23",
    "dp_size": 1,
    "tp_size": 1,
    "enable_lora": True,
    "max_lora_rank": 8,
    "dtype": "float32",
    "device": "cpu",
    "max_req_input_len": 506,
}
CARDS = {"data": [{"id": "tiny", "max_model_len": 512}, {"id": "x", "max_model_len": None}]}
TOKENS, LOGPROBS = [7, 8], [-0.5, -1.5]


class Line:
    """A connection on which a request has come."""

    def __init__(self, server: "Faulty", connection: socket.socket) -> None:
        self.server, self.connection = server, connection

    def send(self, content: bytes) -> None:
        self.connection.sendall(content)

    def head(self, length: int, status: str = "200 OK", *more: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {length}", *more]
        self.send("\r\n".join([*lines, "", ""]).encode())

    def answer(self, value: object, status: str = "200 OK") -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.head(len(content), status, "Content-Type: application/json")
        self.send(content)

    def reset(self) -> None:
        """End the connection as a process that is killed does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


Fault = Callable[[Line, bytes], None]
"""What happens instead of an answer; is given the right one."""


def hang(line: Line, right: bytes) -> None:
    line.server.release.wait(60)
    line.reset()


def drip(line: Line, right: bytes) -> None:
    line.head(10 * len(right))
    for _ in range(10 * len(right)):
        line.send(b" ")
        if line.server.release.wait(0.02):
            break


def reset_before(line: Line, right: bytes) -> None:
    line.reset()


def reset_within(line: Line, right: bytes) -> None:
    line.head(len(right))
    line.send(right[: len(right) // 2])
    time.sleep(0.05)
    line.reset()


def cut_off(line: Line, right: bytes) -> None:
    line.head(len(right))
    line.send(right[: len(right) // 2])
    line.connection.close()


def truncated(line: Line, right: bytes) -> None:
    line.answer(right[: len(right) // 2])


def page(line: Line, right: bytes) -> None:
    line.answer(b"<!DOCTYPE html><html><body>Jupyter</body></html>")


def redirect(line: Line, right: bytes) -> None:
    line.head(0, "302 Found", "Location: http://example.invalid/login")


def says(status: str, value: object = None) -> Fault:
    """An answer of one's own."""
    return lambda line, right: line.answer({} if value is None else value, status)


def changed(change: Callable[[dict], object]) -> Fault:
    """The right answer, changed in place."""

    def fault(line: Line, right: bytes) -> None:
        value = json.loads(right)
        change(value)
        line.answer(value)

    return fault


class Faulty:
    """The server; ``faults[path]`` are carried out one after the other, one for each request."""

    def __init__(self, port: int = 0) -> None:
        self.faults: defaultdict[str, list[Fault]] = defaultdict(list)
        self.pages = {"/model_info": INFO, "/server_info": SERVER, "/v1/models": CARDS}
        self.asked: list[tuple[str, dict]] = []
        self.heads: list[dict[bytes, bytes]] = []
        self.release = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stop(self) -> None:
        self.release.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        end = time.monotonic() + 60
        while any(thread.is_alive() for thread in self._threads):
            assert time.monotonic() < end, "a thread of the server does not end"
            for connection in list(self._open):  # one may have been accepted just now
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in list(self._threads):
                thread.join(0.1)

    def count(self, path: str) -> int:
        return [asked for asked, _ in self.asked].count(path)

    def bodies(self, path: str) -> list[dict]:
        return [body for asked, body in self.asked if asked == path]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection:
            for path, head, body in _requests(connection):
                self.heads.append(head)
                self.asked.append((path, body))
                right = json.dumps(self._right(path, body)).encode()
                queue = self.faults[path]
                if queue:
                    queue.pop(0)(Line(self, connection), right)
                else:
                    Line(self, connection).answer(right)
        self._open.discard(connection)

    def _right(self, path: str, body: dict) -> object:
        if path in self.pages:
            return self.pages[path]
        if path == "/generate" and "token_ids_logprob" in body:
            return {"error": {"message": "token id 9007; valid range is [0, 259)."}}
        if path == "/generate":
            prompts = body["input_ids"]
            single = isinstance(prompts[0], int)
            made = [completion(p, body) for p in ([prompts] if single else prompts)]
            return made[0] if single else made
        return {"success": True, "message": "done"}


def completion(prompt: list[int], body: dict) -> dict:
    """Two tokens, or none if none are wanted."""
    settings = body["sampling_params"]
    wanted = (settings[0] if isinstance(settings, list) else settings)["max_new_tokens"]
    tokens, logprobs = TOKENS[:wanted], LOGPROBS[:wanted]
    return {
        "text": "ab",
        "output_ids": tokens,
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "length" if wanted <= 2 else "stop"},
            "weight_version": "default",
            "weight_versions": [{"version": "default", "start": 0, "end": len(tokens)}],
            "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, tokens, strict=True)],
            "output_top_logprobs": [
                [[p, t, None], [-3.0, 9, None]] for p, t in zip(logprobs, tokens, strict=True)
            ],
            "input_token_logprobs": [
                [None if i == 0 else -float(i), t, None] for i, t in enumerate(prompt)
            ],
        },
    }


def _requests(connection: socket.socket) -> Iterator[tuple[str, dict, dict]]:
    """The requests on a connection: path, headers and JSON."""
    # Not by makefile(): a file keeps the connection open when it is closed.
    held = b""
    while True:
        while b"\r\n\r\n" not in held:
            more = connection.recv(65536)
            if not more:
                return
            held += more
        head, _, held = held.partition(b"\r\n\r\n")
        first, *headers = head.split(b"\r\n")
        pairs = (header.split(b": ", 1) for header in headers)
        named = {name.lower(): value for name, value in pairs}
        length = int(named.get(b"content-length", 0))
        while len(held) < length:
            more = connection.recv(65536)
            if not more:
                return
            held += more
        body, held = held[:length], held[length:]
        yield first.split()[1].decode(), named, json.loads(body) if body else {}
