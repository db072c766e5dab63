"""The service client: the way in.  It makes training and sampling clients."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from xorl_lab.client.async_names import with_async
from xorl_lab.client.local import EMBEDDED, LocalService
from xorl_lab.client.remote import RemoteService
from xorl_lab.client.rest import RestClient
from xorl_lab.client.sampling import SamplingClient
from xorl_lab.client.training import TrainingClient
from xorl_lab.errors import ConfigError
from xorl_lab.home import home as default_home
from xorl_lab.types import LoraRunSpec
from xorl_lab.types.params import DEFAULT_ALPHA


@with_async(
    "create_training_client!",
    "create_lora_training_client!",
    "create_training_client_from_state!",
    "create_training_client_from_state_with_optimizer!",
    "create_sampling_client!",
    "create_rest_client",
)
class ServiceClient:
    """Makes clients that train and sample, in this process or on a server.

    Args:
        base_url: of a training server, ``xorl-lab serve`` or xorl's own; None =
            ``$XORL_BASE_URL``, and without that this process does the work.
        api_key: bearer token of that server; None = ``$XORL_API_KEY``.
        timeout: seconds that an answer of that server may take.
        home: folder of checkpoints; None = ``$XORL_LAB_HOME`` or ``~/.xorl_lab``.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``; in this process only.
        dtype: ``auto``, ``float32`` or ``bfloat16``; in this process only.
        sampler: what draws completions; in this process only.  None = ``embedded``, in the process
            itself; ``sglang``, a SGLang server that is started for the model when it is first
            needed; or the URL of one that serves the same model.
        sampler_key: bearer token of the SGLang server at that URL (its ``--api-key``); None =
            ``$XORL_SAMPLER_KEY``.

    Raises:
        ConfigError: a URL is none, there is no such sampler, or it takes no key.
    """

    def __init__(  # noqa: PLR0913 (each is a choice of the caller's)
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 1800.0,
        *,
        home: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        sampler: str | None = None,
        sampler_key: str | None = None,
    ) -> None:
        url = base_url or os.environ.get("XORL_BASE_URL")
        self.timeout = timeout
        self.api_key = api_key or os.environ.get("XORL_API_KEY")
        self._service: LocalService | RemoteService
        if url:
            _refuse_sampler(sampler, sampler_key, url)
            self._service = RemoteService(url, self.api_key, timeout)
        else:
            root = Path(home or default_home()).expanduser() / "checkpoints"
            where = _sampler(sampler)
            self._service = LocalService(root, device, dtype, where, _key(where, sampler_key))

    @property
    def root(self) -> Path | None:
        """Folder of all checkpoints; None if a server keeps them."""
        return self._service.root if isinstance(self._service, LocalService) else None

    def create_training_client(self, base_model: str, model_id: str = "default") -> TrainingClient:
        """Train a copy of the full weights.

        Args:
            base_model: name of the base model, or a local folder.
            model_id: name of the trained model.  A client that this service made before under the
                same name can no longer be used.

        Raises:
            ConfigError: the model is unknown.
            CheckpointError: ``validation.invalid_model_id``.
        """
        return TrainingClient(self._service.create(base_model, model_id, None))

    def create_lora_training_client(  # noqa: PLR0913  (the settings of both seeds)
        self,
        base_model: str,
        rank: int = 32,
        *,
        model_id: str = "default",
        alpha: float | None = None,
        dropout: float = 0.0,
        target_modules: Sequence[str] | None = None,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = False,
    ) -> TrainingClient:
        """Train a LoRA adapter; the base model is shared and never changed.

        Args:
            base_model: name of the base model, or a local folder.
            rank: inner dimension r of the adapter.
            model_id: name of the trained model.  A client that this service made before under the
                same name can no longer be used.
            alpha: the adapter's update is scaled by alpha / rank; None = 32.
            dropout: share of the adapter's inputs zeroed while training.
            target_modules: names of the linear layers to adapt; None = those of the switches.
            seed: fixes initial values and dropout; None draws one.
            train_mlp: adapt the MLP blocks.
            train_attn: adapt the attention blocks.
            train_unembed: adapt the head.

        Raises:
            ConfigError: the model is unknown, or a setting out of range.
            CheckpointError: ``validation.invalid_model_id``.
        """
        if isinstance(target_modules, str):
            raise ConfigError(
                f"target_modules is {target_modules!r}: pass a list of names of linear layers"
            )
        # A server draws the seed of a model itself, and keeps that of one it holds.
        remote = isinstance(self._service, RemoteService)
        spec = LoraRunSpec(
            rank=rank,
            alpha=DEFAULT_ALPHA if alpha is None else alpha,
            dropout=dropout,
            seed=seed if seed is not None or remote else secrets.randbits(31),
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
            target_modules=None if target_modules is None else tuple(target_modules),
        )
        return TrainingClient(self._service.create(base_model, model_id, spec))

    def create_training_client_from_state(
        self, checkpoint_path: str, base_model: str | None = None, *, model_id: str = "default"
    ) -> TrainingClient:
        """A client with a checkpoint's weights and a fresh optimizer.

        Args:
            checkpoint_path: what save_state returned as its path.
            base_model: must be the checkpoint's own, if given.
            model_id: name of the trained model.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or of another base model.
        """
        return self._resume(checkpoint_path, base_model, model_id, with_optimizer=False)

    def create_training_client_from_state_with_optimizer(
        self, checkpoint_path: str, base_model: str | None = None, *, model_id: str = "default"
    ) -> TrainingClient:
        """A client that continues a run exactly: weights, optimizer, random state, step count.

        Args:
            checkpoint_path: what save_state returned as its path.
            base_model: must be the checkpoint's own, if given.
            model_id: name of the trained model.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, of another base model, or was
                trained in another dtype.
        """
        return self._resume(checkpoint_path, base_model, model_id, with_optimizer=True)

    def create_sampling_client(
        self,
        base_url: str | None = None,
        model_path: str | None = None,
        *,
        base_model: str | None = None,
    ) -> SamplingClient:
        """Sample from saved weights, from a base model as it is, or from a server.

        Args:
            base_url: of a server with a ``/generate``; None = this process draws, or the server
                that this service speaks to.
            model_path: what save_weights_for_sampler returned as its path.
            base_model: sample from this model, untrained.  Give this or ``model_path``.

        Raises:
            ConfigError: both or neither were given, or the model is unknown.
            CheckpointError: the checkpoint is missing, damaged, or does not fit its base model.
        """
        if isinstance(self._service, RemoteService):
            if model_path:
                self._service.load_adapter(model_path)
            base_url = base_url or self._service.base_url
        if base_url is not None:
            return SamplingClient(base_url, model_path or "", self.api_key, self.timeout)
        if (model_path is None) == (base_model is None):
            raise ConfigError(
                f"model_path={model_path!r} and base_model={base_model!r}: pass one of the two"
            )
        assert isinstance(self._service, LocalService)
        if model_path is not None:
            engine, sampler, version = self._service.sampling_version(model_path)
        else:
            engine, sampler = self._service.open(str(base_model))
            version = engine.base_version
        return SamplingClient.of(self._service.drawing(engine, sampler).lazily(version))

    def create_rest_client(self, model_id: str = "default") -> RestClient:
        """A client that looks after checkpoints and runs.

        Args:
            model_id: the model that it is about.
        """
        return RestClient(self._service, model_id)

    def close(self) -> None:
        """End the connections to a server; what is still awaited there is cancelled."""
        if isinstance(self._service, RemoteService):
            self._service.close()

    def __enter__(self) -> "ServiceClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resume(
        self, path: str, base_model: str | None, model_id: str, *, with_optimizer: bool
    ) -> TrainingClient:
        session = self._service.resume(path, base_model, model_id, with_optimizer=with_optimizer)
        return TrainingClient(session)


def _sampler(name: str | None) -> str:
    """Where completions are drawn.

    Raises:
        ConfigError: there is no such sampler.
    """
    if name in (None, EMBEDDED):
        return EMBEDDED
    if name == "sglang" or (isinstance(name, str) and name.startswith(("http://", "https://"))):
        return str(name).rstrip("/")
    raise ConfigError(
        f"sampler is {name!r}: pass 'embedded', 'sglang', or the URL of a SGLang server such as "
        "'http://localhost:30000'"
    )


def _key(sampler: str, given: str | None) -> str | None:
    """What a sampler at a URL is sent as a bearer token; no other is sent one.

    Raises:
        ConfigError: a key was given for another sampler.
    """
    if "://" in sampler:
        return given or os.environ.get("XORL_SAMPLER_KEY")
    if given is not None:
        raise ConfigError(
            "sampler_key is for a SGLang server that runs already: pass its URL as sampler, or "
            "leave sampler_key out"
        )
    return None


def _refuse_sampler(name: str | None, key: str | None, url: str) -> None:
    if name is not None or key is not None:
        what = "sampler_key is set" if name is None else f"sampler is {name!r}"
        raise ConfigError(
            f"{what}, but the server at {url} trains, and sends weights to samplers "
            "itself: register yours with TrainingClient.add_inference_endpoint, or leave base_url "
            "(and $XORL_BASE_URL) out to train in this process"
        )
