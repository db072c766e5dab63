"""Which metrics belong together, under which title, and in which order they are drawn."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Shape = Literal["line", "points", "stack"]

MORE = "more"
"""Section of what no panel asks for."""


@dataclass(frozen=True, slots=True)
class Line:
    """One metric as it is drawn."""

    name: str
    """Of the metric."""
    label: str
    """What the person reads."""
    shape: Shape = "line"
    """``points`` for values that most steps lack, ``stack`` for parts of a whole."""
    spread: str | None = None
    """Metric with the standard deviation around this one, drawn as a band."""
    low: str | None = None
    """Metric with the least value, drawn as the band's lower edge."""
    high: str | None = None
    """Metric with the greatest value, drawn as the band's upper edge."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart."""

    key: str
    """Unique among the panels."""
    title: str
    """What the person reads."""
    unit: str
    """Of its values; empty for plain numbers."""
    section: str
    """``main`` or :data:`MORE`."""
    lines: Sequence[Line]
    """From the most important one on."""
    share: bool = False
    """True if the values lie between 0 and 1."""

    def plain(self) -> dict[str, Any]:
        """The panel as JSON takes it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A panel before it is known which metrics there are."""

    key: str
    title: str
    unit: str
    wanted: Sequence[tuple[str, str]]
    """(name or prefix ending in ``*``, label or empty for the rest of the name)."""
    share: bool = False
    shape: Shape = "line"
    hidden: Sequence[str] = field(default_factory=tuple)
    """Metrics that say the same as others of this panel: drawn where there are no others."""


_PLANS = (
    _Plan(
        "reward",
        "Reward",
        "",
        (
            ("reward", "mean"),
            ("held_out:accuracy", "held-out accuracy"),
            ("held_out:reward", "held-out reward"),
            ("reward:part:*", ""),
        ),
    ),
    _Plan("loss", "Loss", "nats/token", (("loss:mean", "loss"), ("held_out:loss", "held-out"))),
    _Plan(
        "kl",
        "KL divergence",
        "nats/token",
        (
            ("kl_sampler", "sampler–trainer"),
            ("kl_base", "to base"),
            ("kl_ref", "to reference"),
            ("kl_sample_train_k3", "old–new policy"),
        ),
    ),
    _Plan("entropy", "Entropy", "nats/token", (("entropy_sample", "of samples"), ("entropy", ""))),
    _Plan(
        "clipped",
        "Clipped, masked",
        "share",
        (
            ("pg_clipfrac", "clipped"),
            ("icepop_maskfrac", "masked"),
            ("tis_clipfrac", "TIS clipped"),
        ),
        share=True,
    ),
    _Plan("ratio", "Probability ratio", "", (("ratio_mean", "mean"), ("tis_mean", "TIS weight"))),
    _Plan("grad", "Gradient norm", "", (("grad_norm", "before clipping"),)),
    _Plan("length", "Completion length", "tokens", (("completion_tokens", "mean"),)),
    _Plan("turns", "Turns of an episode", "", (("turns", "mean"),)),
    _Plan("truncated", "Truncated", "share", (("truncated", "cut off"),), share=True),
    _Plan(
        "signal",
        "Without signal",
        "",
        (("groups_without_signal", "groups"), ("rewards_failed", "failed rewards")),
    ),
    _Plan(
        "time",
        "Time of a step",
        "s",
        (
            ("seconds:sample", ""),
            ("seconds:score", ""),
            ("seconds:train", ""),
            ("seconds:sync", ""),
            ("seconds:evaluate", ""),
            ("seconds:*", ""),
        ),
        shape="stack",
        hidden=("seconds:total", "seconds:step"),
    ),
    _Plan("speed", "Speed", "tokens/s", (("tokens_per_second", "all of the step"),)),
    _Plan(
        "memory",
        "Memory",
        "bytes",
        (("memory:process", "of the process"), ("memory:device", "on the GPU"), ("memory:*", "")),
    ),
    _Plan("rate", "Learning rate", "", (("learning_rate", "learning rate"),)),
)
_ALIASES = frozenset({"loss_sum", "loss_mean", "token_count"})
"""Second names of other metrics."""
_MOST_LINES = 6
"""A chart with more lines than there are colours is read by nobody."""


def panels(names: Iterable[str], *, several: bool = False) -> list[Panel]:
    """Arrange metrics in panels.

    Args:
        names: of all metrics that there are.
        several: True if several runs are laid over each other: then each line has a panel of its
            own, in which colour and dash tell the runs apart.

    Returns:
        The panels that have something to draw; what no plan asks for is in section ``more``, or
        comes first where there is neither reward nor loss: the loop is one of the caller's own.
    """
    left = {name: None for name in names if name not in _ALIASES}
    found = [panel for plan in _PLANS if (panel := _planned(plan, left))]
    others = _others(left)
    if any(panel.key in ("reward", "loss") for panel in found):
        found += others
    else:
        found = [*(replace(panel, section="main") for panel in others), *found]
    return [single for panel in found for single in _singles(panel)] if several else found


def _planned(plan: _Plan, left: dict[str, None]) -> Panel | None:
    """The panel of a plan; takes what it uses out of ``left``."""
    labels: dict[str, str] = {}
    for wanted, label in plan.wanted:
        prefix = len(wanted) - 1 if wanted.endswith("*") else wanted.rfind(":") + 1
        for name in _matching(wanted, left):
            if not name.endswith((":std", ":min", ":max")):
                labels.setdefault(name, label or name[prefix:])
    told = [name for name in labels if name not in plan.hidden] or list(labels)[:1]
    lines: list[Line] = []
    for name in told:
        if name in left and len(lines) < _MOST_LINES:  # it may be the edge of a band by now
            shape = "points" if name.startswith("held_out") else plan.shape
            lines.append(_line(name, labels[name], shape, left))
    if not lines:
        return None
    for name in plan.hidden:
        left.pop(name, None)
    return Panel(plan.key, plan.title, plan.unit, "main", lines, plan.share)


def _matching(wanted: str, names: Iterable[str]) -> list[str]:
    if wanted.endswith("*"):
        return sorted(name for name in names if name.startswith(wanted[:-1]))
    return [name for name in names if name == wanted]


def _line(name: str, label: str, shape: Shape, left: dict[str, None]) -> Line:
    """A line with whatever band belongs to it; takes both out of ``left``."""
    del left[name]
    base = name.removesuffix("_mean")
    edges = [(f"{name}:min", f"{name}:max")]
    if base != name:
        edges.append((f"{base}_min", f"{base}_max"))
    spread = f"{name}:std" if f"{name}:std" in left else None
    low, high = next((e for e in edges if e[0] in left and e[1] in left), (None, None))
    for used in (spread, low, high):
        if used is not None:
            left.pop(used)
    return Line(name, label, shape, spread, low, high)


def _others(left: dict[str, None]) -> list[Panel]:
    """Panels of what is left over, one per prefix before a colon, else one per name."""
    heads: dict[str, list[str]] = {}
    bases = [n for n in left if not n.endswith((":std", ":min", ":max", "_min", "_max"))]
    ordered = [*sorted(bases), *sorted(left.keys() - set(bases))]
    for name in ordered:
        heads.setdefault(name.split(":")[0] if ":" in name else name, []).append(name)
    found: list[Panel] = []
    for head, names in heads.items():
        lines = [
            _line(n, n.removeprefix(f"{head}:") or n, "line", left) for n in names if n in left
        ]
        for i in range(0, len(lines), _MOST_LINES):
            part = lines[i : i + _MOST_LINES]
            key = f"more:{head}" + (f":{i}" if i else "")
            title = _words(head if len(lines) > 1 else part[0].name)
            found.append(Panel(key, title, "", MORE, part))
    return found


def _words(name: str) -> str:
    """A metric's name as a title."""
    text = name.replace("_", " ").replace(":", ": ")
    return text[:1].upper() + text[1:]


def _singles(panel: Panel) -> list[Panel]:
    """One panel per line."""
    if len(panel.lines) == 1:
        return [panel]
    return [
        Panel(
            f"{panel.key}/{line.name}",
            f"{panel.title}: {line.label}",
            panel.unit,
            panel.section,
            [
                Line(
                    line.name,
                    line.label,
                    "line" if line.shape == "stack" else line.shape,
                    line.spread,
                    line.low,
                    line.high,
                )
            ],
            panel.share,
        )
        for line in panel.lines
    ]
