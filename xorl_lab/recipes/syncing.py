"""Numbers of sending weights to a sampler elsewhere."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xorl_lab.client import SamplingClient


def sync_metrics(sampler: "SamplingClient") -> dict[str, float]:
    """What the canary said of a sampler's weights; nothing where they were not sent anywhere.

    Returns:
        ``sync_gap``, ``sync_change`` and ``sync_noise`` in nats, and ``sync_bytes``.
    """
    report = sampler.sync
    if report is None:
        return {}
    canary = report.canary
    figures = {"gap": canary.gap, "change": canary.change, "noise": canary.noise}
    return {f"sync_{name}": value for name, value in (figures | {"bytes": report.bytes}).items()}
