"""The REST client: which checkpoints and runs there are."""

from typing import Protocol

from xorl_lab.client.async_names import with_async
from xorl_lab.futures import APIFuture
from xorl_lab.types.checkpoints import (
    CheckpointsListResponse,
    DeleteCheckpointResponse,
    TrainingRunsResponse,
    WeightsInfoResponse,
)


class Shelf(Protocol):
    """Where checkpoints are kept: this machine, or a server."""

    def list_checkpoints(self, model_id: str) -> APIFuture[CheckpointsListResponse]:
        """The checkpoints of a model."""
        ...

    def delete_checkpoint(self, model_id: str, which: str) -> APIFuture[DeleteCheckpointResponse]:
        """Delete one, by ``KIND/NAME`` or URI."""
        ...

    def weights_info(self, path: str) -> APIFuture[WeightsInfoResponse]:
        """What one is of."""
        ...

    def training_runs(self) -> APIFuture[TrainingRunsResponse]:
        """All models."""
        ...


@with_async(
    "list_checkpoints",
    "delete_checkpoint",
    "get_weights_info",
    "get_weights_info_by_xorl_path",
    "list_training_runs",
)
class RestClient:
    """Looks after the checkpoints of one model.  Made by a service client."""

    def __init__(self, shelf: Shelf, model_id: str) -> None:
        self._shelf = shelf
        self.model_id = model_id

    def list_checkpoints(self, model_id: str | None = None) -> APIFuture[CheckpointsListResponse]:
        """The checkpoints of a model, oldest first.

        Args:
            model_id: None = this client's.
        """
        return self._shelf.list_checkpoints(model_id or self.model_id)

    def delete_checkpoint(self, checkpoint_id: str) -> APIFuture[DeleteCheckpointResponse]:
        """Delete a checkpoint.

        Args:
            checkpoint_id: ``weights/NAME`` or ``sampler_weights/NAME``, or its URI.
        """
        return self._shelf.delete_checkpoint(self.model_id, checkpoint_id)

    def get_weights_info(self, checkpoint_id: str) -> APIFuture[WeightsInfoResponse]:
        """Base model, kind and rank of a checkpoint.

        Args:
            checkpoint_id: ``weights/NAME`` or ``sampler_weights/NAME``, or its URI.
        """
        path = checkpoint_id
        if not path.startswith("xorl://"):
            path = f"xorl://{self.model_id}/{checkpoint_id}"
        return self._shelf.weights_info(path)

    def get_weights_info_by_xorl_path(self, xorl_path: str) -> APIFuture[WeightsInfoResponse]:
        """Base model, kind and rank of a checkpoint, by its URI."""
        return self._shelf.weights_info(xorl_path)

    def list_training_runs(self) -> APIFuture[TrainingRunsResponse]:
        """All models that are held, or of which there are checkpoints."""
        return self._shelf.training_runs()
