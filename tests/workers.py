"""How tests are divided among processes: ``pytest -n 2``, as ``make test`` does.

A file is run by one process, with what its fixtures make once for a module.  Files that share what
is dearer than that, or would disturb each other, are run by the same one.
"""

import re
from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]
GROUPS = {
    "sglang": re.compile(r'\b(sglang_server|need_sglang|xdist_group\("sglang"\))'),
    "browser": re.compile(r"\bchromium\b"),
}
"""What the text of a file holds that belongs to a group.

The mark itself does not reach the scheduler: pytest 9.2 makes nothing of the names that
pytest-xdist 3.8 gives to marked tests.
"""


class Division(LoadScopeScheduling):
    """Groups, and files where there is no group, in the order in which they are collected."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid.split("::")[0])


@cache
def group(file: str) -> str:
    """The group of a file, given by its path in the repository; that path where it has none."""
    path = ROOT / file
    text = path.read_text(encoding="utf-8") if path.suffix == ".py" else ""
    return next((name for name, words in GROUPS.items() if words.search(text)), file)
