"""The service client: the way in.  It makes training and sampling clients."""

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from xorl_lab import checkpoints
from xorl_lab.checkpoints import Address
from xorl_lab.client.local import LocalService, LocalSession
from xorl_lab.client.sampling import SamplingClient
from xorl_lab.client.training import TrainingClient
from xorl_lab.engine import saving
from xorl_lab.errors import CheckpointError, ConfigError
from xorl_lab.home import home as default_home
from xorl_lab.types import LoraRunSpec

DEFAULT_ALPHA = 32.0
"""alpha of an adapter if none is given, whatever its rank (tinker's documented value)."""


class ServiceClient:
    """Makes clients that train and sample in this process.

    Args:
        base_url: must be None for now: only in-process work is offered.
        api_key: not used in-process.
        timeout: not used in-process.
        home: folder of checkpoints; None = ``$XORL_LAB_HOME`` or ``~/.xorl_lab``.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        dtype: ``auto``, ``float32`` or ``bfloat16``.

    Raises:
        ConfigError: a server was asked for.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 1800.0,
        *,
        home: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
    ) -> None:
        url = base_url or os.environ.get("XORL_BASE_URL")
        if url:
            raise ConfigError(
                f"base_url is {url!r}, but this version works in-process only: leave base_url "
                "out and unset XORL_BASE_URL"
            )
        self.timeout = timeout
        self.root = Path(home or default_home()).expanduser() / "checkpoints"
        self._local = LocalService(self.root, device, dtype)

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
        return self._create(base_model, model_id, None)

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
        spec = LoraRunSpec(
            rank=rank,
            alpha=DEFAULT_ALPHA if alpha is None else alpha,
            dropout=dropout,
            seed=secrets.randbits(31) if seed is None else seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
            target_modules=None if target_modules is None else tuple(target_modules),
        )
        return self._create(base_model, model_id, spec)

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

    def create_sampling_client(self, *, base_model: str) -> SamplingClient:
        """Sample from a base model as it is.

        Raises:
            ConfigError: the model is unknown.
        """
        engine, sampler = self._local.open(base_model)
        return SamplingClient(engine, sampler, engine.base_version)

    def _create(
        self,
        base_model: str,
        model_id: str,
        spec: LoraRunSpec | None,
        prepare: Callable[[LocalSession], object] = lambda _: None,
    ) -> TrainingClient:
        return TrainingClient(self._local.create(base_model, model_id, spec, prepare))

    def _resume(
        self, path: str, base_model: str | None, model_id: str, *, with_optimizer: bool
    ) -> TrainingClient:
        address = Address.parse(path)
        state = checkpoints.read(address.folder(self.root))
        saved = state["base_model"]
        if base_model is not None and base_model != saved:
            raise CheckpointError(
                "validation.checkpoint_config_mismatch",
                f"checkpoint {path} is of base model {saved!r}, but {base_model!r} was asked for: "
                "leave base_model out",
                {"base_model": {"checkpoint": saved, "requested": base_model}},
            )

        def load(session: LocalSession) -> None:
            session.load(address, with_optimizer=with_optimizer).result()

        return self._create(saved, model_id, saving.lora_spec(state), load)
