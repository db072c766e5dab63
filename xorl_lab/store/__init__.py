"""The run store: metrics, rollouts and events of runs in one SQLite file.

One writer per run, readers from any process.  What was committed survives a kill at any moment.
Nothing here imports torch, and pandas only on first use.
"""

from xorl_lab.store.notes import Note
from xorl_lab.store.reader import Reader
from xorl_lab.store.records import Event, Parent, RunInfo, RunStatus, Scalars, StoredRollout
from xorl_lab.store.rollouts import Condition
from xorl_lab.store.store import Store
from xorl_lab.store.writer import Writer

__all__ = [
    "Condition",
    "Event",
    "Note",
    "Parent",
    "Reader",
    "RunInfo",
    "RunStatus",
    "Scalars",
    "Store",
    "StoredRollout",
    "Writer",
]
