"""A SGLang server that answers with what the trainer says of the version that it was sent."""

from dataclasses import replace
from types import SimpleNamespace

from tests.samplers.fake_sglang import FakeServer
from xorl_lab.futures import APIFuture
from xorl_lab.samplers.sync.handover import Handover


class Watching(Handover):
    """Notes which version was handed over last."""

    def __init__(self, engine, sampler):
        super().__init__(engine, sampler)
        self.embedded = sampler
        self.last = self.base

    def write_adapter(self, version, folder):
        self.last = version
        return super().write_adapter(version, folder)

    def tensors(self, version):
        self.last = version
        return super().tensors(version)


class Mirror(FakeServer):
    """In the place of ``SGLang``; all of a test share one, which is told its trainer."""

    def __init__(self, *_, **__):
        super().__init__()
        self.trainer = None
        self.held = None
        self.url = "http://mirror"

    def require(self, *, vocab_size, model, rank, context_length=None):
        del context_length
        self._note("require", rank)
        assert (vocab_size, model) == (self.trainer.vocab_size, self.trainer.name)
        return SimpleNamespace(weight_version=self.named, dtype="float32", model_path="mirror")

    def load_adapter(self, name, folder, *, again=False):
        del again
        if self._note("load_adapter", name):
            assert (folder / "adapter_config.json").exists()
            self.adapters[name] = self.trainer.last

    def update_from_tensors(self, tensors, name, bucket_bytes=0):
        assert self.paused
        assert bucket_bytes
        sent = sum(tensor.nbytes for _, tensor in tensors)
        if self._note("update_from_tensors"):
            self.held = self.trainer.last
        self.named = name
        return sent

    def score(self, tokens, adapter=None):
        self._note("score", adapter)
        assert tuple(tokens) == self.trainer.text
        return self.trainer.score(self.version(adapter))

    def version(self, adapter):
        if adapter:
            return self.adapters[adapter]
        return self.held or self.trainer.base

    def release_memory(self):
        self._note("release_memory")

    def resume_memory(self):
        self._note("resume_memory")

    def submit(self, requests):
        """As ``RemoteSource`` does: draws from what is there now."""
        self._note("submit", len(requests))
        return [self._drawn(request) for request in requests]

    def _drawn(self, request):
        version = self.version(request.lora_path)
        drawn = self.trainer.embedded.submit(version, replace(request, lora_path=None))
        answer = APIFuture(drawn.cancel)
        named = self.named

        def pass_on(future):
            error = future.exception(0)
            if error is not None:
                answer.set_exception(error)
                return
            meta = {"weight_version": named, "id": "x"}
            answer.set_result(replace(future.result(0), meta_info=meta))

        drawn.add_done_callback(pass_on)
        return answer

    def close(self):
        self._note("close")


class Process:
    """In the place of a server that was started."""

    def __init__(self, url="http://mirror"):
        self.url, self.alive, self.stopped = url, True, False

    def stop(self):
        self.stopped, self.alive = True, False
