"""How tests are divided among processes: ``pytest -n 2 --dist loadgroup``, as ``make test`` does.

A file is run by one process, with what its fixtures make once for a module.  Files that share what
is dearer than that, or would disturb each other, are run by the same one.
"""

from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

TAKEN = {"sglang_server": "sglang"}
"""Fixtures that put the file of a test into a group."""
IMPORTED = {"need_sglang": "sglang", "chromium": "browser"}
"""Names in a file that do.  Or it says so by itself: ``pytest.mark.xdist_group("sglang")``."""


class Division(LoadGroupScheduling):
    """Groups, and files where there is no group, in the order in which they are collected."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return super()._split_scope(nodeid).split("::")[0]


def keep_together(items: list[pytest.Item]) -> None:
    """Give every test of a file the group of the file."""
    groups: dict[Path, str] = {}
    for item in items:
        taken = TAKEN.keys() & set(getattr(item, "fixturenames", ()))
        imported = IMPORTED.keys() & set(dir(getattr(item, "module", None)))
        for name in taken | imported:
            groups[item.path] = (TAKEN | IMPORTED)[name]
    for item in items:
        if item.path in groups:
            item.add_marker(pytest.mark.xdist_group(groups[item.path]))
