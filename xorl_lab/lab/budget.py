"""What checkpoints may take on the disk, and what is given up to keep to it."""

import re
from dataclasses import dataclass

from xorl_lab.checkpoints import catalog
from xorl_lab.errors import CheckpointError, ConfigError
from xorl_lab.lab.holding import by_run, in_use, look
from xorl_lab.lab.memory import amount
from xorl_lab.lab.weights import Saved, Weights, by_step

_UNITS = {"": 1} | {
    f"{letter}{binary}": base**power
    for power, letter in enumerate("KMGT", 1)
    for binary, base in (("", 1000), ("I", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?")


@dataclass(frozen=True, slots=True)
class Excess:
    """The limit was passed."""

    text: str
    """In words: by how much, and what was done about it."""
    deleted: list[str]
    """Addresses of the checkpoints that had to go."""
    before: int
    """Bytes before."""
    after: int
    """Bytes that are left."""


def parse_bytes(size: object) -> int:
    """An amount of memory in bytes.

    >>> parse_bytes("5GB"), parse_bytes("1.5 GiB"), parse_bytes(100)
    (5000000000, 1610612736, 100)

    Raises:
        ConfigError: it is none.
    """
    match = _SIZE.fullmatch(size.strip().upper()) if isinstance(size, str) else None
    if match is not None:
        return int(float(match[1]) * _UNITS[match[2] or ""])
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    raise ConfigError(f"disk_budget is {size!r}: pass bytes, or a size such as '5GB' or '500MB'")


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit for all checkpoints of a lab.

    Over it the oldest of those go that runs saved by themselves.  The last of a run stays, and so
    does what is in use, and whatever somebody named.
    """

    limit: int
    """Bytes."""
    weights: Weights
    """The checkpoints."""

    def keep_to(self) -> Excess | None:
        """Delete what has to go.

        Returns:
            What was the matter; None if all is within the limit.
        """
        root = self.weights.service.root
        if root is None:  # a server keeps them, and its own house
            return None
        used = before = catalog.disk_use(root)
        if used <= self.limit:
            return None
        gone: list[Saved] = []
        for saved in self._expendable():
            if used <= self.limit:
                break
            size = catalog.disk_use(saved.address.folder(root))
            try:
                catalog.delete(root, saved.address)
            except (CheckpointError, OSError):
                continue  # another process was quicker, or holds it
            used -= size
            gone.append(saved)
        paths = [saved.entry.path for saved in gone]
        return Excess(_sentence(before, used, self.limit, gone), paths, before, used)

    def _expendable(self) -> list[Saved]:
        """What may go, the oldest first."""
        runs, everything = look(self.weights)
        held = in_use(runs, everything)
        steps = [by_step(mine) for mine in by_run(everything).values()]
        last = {own[max(own)].entry.path for own in steps if own}
        return [
            saved
            for saved in everything
            if saved.automatic and saved.entry.path not in held and saved.entry.path not in last
        ]


def _sentence(before: int, after: int, limit: int, gone: list[Saved]) -> str:
    text = f"the checkpoints took {amount(before)}, over the budget of {amount(limit)}"
    if gone:
        names = ", ".join(saved.reference for saved in gone)
        text += f": {names} {'was' if len(gone) == 1 else 'were'} deleted"
    if after <= limit:
        return text
    return (
        f"{text}{';' if gone else ', and'} {amount(after)} are left, of which each is the last of "
        "its run, in use, or was named by somebody: delete some with lab.delete, or raise "
        "disk_budget"
    )
