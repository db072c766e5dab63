"""A client that says exactly what it means, for tests of the server."""

import time
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

LORA = {"rank": 4, "seed": 7}


class Api:
    """Requests to a server, through whatever HTTP client it is given."""

    def __init__(self, http):
        self.http = http

    def post(self, path: str, /, **body):
        return self.http.post(path, json=body)

    def ask(self, path: str, /, **body):
        """A direct request that has to succeed."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def send(self, path: str, /, **body) -> str:
        """Phase one: returns the request id."""
        answer = self.ask(f"/api/v1/{path}", **body)
        assert set(answer) == {"request_id", "model_id"}
        return answer["request_id"]

    def fetch(self, request_id: str, within: float = 30.0) -> dict[str, Any]:
        """Phase two: polls until the answer is there."""
        end = time.monotonic() + within
        while time.monotonic() < end:
            answer = self.ask("/api/v1/retrieve_future", request_id=request_id)
            if answer.get("type") != "try_again":
                return answer
            assert answer["request_id"] == request_id
            assert answer["queue_state"] == "active"
        raise AssertionError(f"no answer to {request_id} within {within} s")

    def call(self, path: str, /, **body) -> dict[str, Any]:
        """Both phases."""
        return self.fetch(self.send(path, **body))

    def create(self, model_id: str = "default", **lora) -> dict[str, Any]:
        config = {**LORA, **lora}
        return self.call("create_model", model_id=model_id, base_model="tiny", lora_config=config)


def datum(tokens=(1, 2, 3, 4), **inputs) -> dict[str, Any]:
    """A datum as xorl_client sends it: everything float32."""
    given = {"labels": list(tokens), **inputs}
    return {
        "model_input": {"input_ids": list(tokens)},
        "loss_fn_inputs": {
            name: {"data": list(values), "dtype": "float32", "shape": [len(values)]}
            for name, values in given.items()
        },
    }


def gradient(*tokens, loss_fn="causallm_loss", **params) -> dict[str, Any]:
    """``forward_backward_input`` on one or more token sequences."""
    body = {"data": [datum(t) for t in tokens or [(1, 2, 3, 4)]], "loss_fn": loss_fn}
    return body | ({"loss_fn_params": params} if params else {})


ADAM = {"learning_rate": 1e-2}


def weights(home: Path, uri: str) -> dict[str, bytes]:
    """The tensors of a checkpoint, bit for bit."""
    model, kind, name = uri.removeprefix("xorl://").split("/")
    folder = home / "checkpoints" / model / kind / name
    files = sorted(p for p in folder.glob("*model*.safetensors"))
    assert files, sorted(folder.iterdir())
    return {key: value.tobytes() for f in files for key, value in load_file(f).items()}
