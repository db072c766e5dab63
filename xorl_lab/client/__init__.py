"""The client API of xorl_client and pytrio, in this process."""

from xorl_lab.client.sampling import SamplingClient
from xorl_lab.client.service import ServiceClient
from xorl_lab.client.training import TrainingClient

__all__ = ["SamplingClient", "ServiceClient", "TrainingClient"]
