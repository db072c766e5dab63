"""The record of weights that were sent to a sampler elsewhere."""

from typing import TYPE_CHECKING

from xorl_lab.store import Writer

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient
    from xorl_lab.samplers.sync.report import SyncReport


def note_syncs(writer: Writer, client: "TrainingClient", step: int) -> None:
    """Record what a step has sent, and what speaks against it.

    Args:
        writer: of the run.
        client: the trained model.
        step: that the weights are behind.
    """
    for report in client.take_syncs():
        writer.event("sync", report.describe(), step=step, data=report.data())
        for sentence in warnings(report):
            writer.event("warning", sentence, step=step)


def warnings(report: "SyncReport") -> list[str]:
    """What a person should know of a sync, in sentences that do not differ from step to step."""
    found: list[str] = []
    if report.canary.verdict == "disagrees":
        found.append(f"{report.url} answers with other weights than it was sent")
    if report.canary.verdict == "inconclusive" and report.trained:
        found.append(
            "an update was too small for its arrival at the sampler to be told from noise: the "
            "canary is inconclusive"
        )
    if report.mixed:
        found.append(
            "completions were under way when the sampler's weights were replaced, so that they mix "
            "versions"
        )
    return found
