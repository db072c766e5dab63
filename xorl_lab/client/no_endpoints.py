"""What only a training server has: samplers elsewhere that it sends weights to."""

from collections.abc import Mapping
from typing import Any, Never

from xorl_lab.errors import ConfigError


class NoEndpoints:
    """The calls about such samplers, refused with the way out."""

    def add_inference_endpoint(self, host: str, port: int, world_size: int) -> Never:
        """Not in this process."""
        raise own_sampler(f"add_inference_endpoint({host!r}, {port}, {world_size})")

    def sync_inference_weights(self, body: Mapping[str, Any]) -> Never:
        """Not in this process."""
        raise own_sampler(f"sync_inference_weights ({len(body)} settings)")

    def list_inference_endpoints(self) -> Never:
        """Not in this process."""
        raise own_sampler("list_inference_endpoints")

    def remove_inference_endpoint(self, host: str, port: int) -> Never:
        """Not in this process."""
        raise own_sampler(f"remove_inference_endpoint({host!r}, {port})")


def own_sampler(call: str) -> ConfigError:
    """The refusal of such a call."""
    return ConfigError(
        f"{call} is for training servers: this process samples from its own weights, so use "
        "save_weights_and_get_sampling_client(); to sample elsewhere pass sampler= to "
        "ServiceClient or Lab, or start `xorl-lab serve`"
    )
