"""One thread that keeps all views of this process up to date."""

import logging
import threading
import time
import weakref
from typing import Protocol

_LOG = logging.getLogger(__name__)

INTERVAL = 0.25
"""Seconds between two updates: at most four a second, however many steps there are."""
IDLE_INTERVAL = 1.0
"""Seconds between two looks when nothing has been new for a while."""
_IDLE_AFTER = 10.0


class Updated(Protocol):
    """What is kept up to date."""

    def update(self) -> bool:
        """Send what is new; True if anything was."""
        ...


class Sender:
    """Calls :meth:`Updated.update` of everything that was added, as long as it lives.

    The thread holds nothing alive, runs only while there is something to keep up to date, and
    never lets a training thread wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._views: weakref.WeakSet[Updated] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._quiet_since = 0.0

    def add(self, view: Updated) -> None:
        """Keep a view up to date from now on."""
        with self._lock:
            self._views.add(view)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="xorl-widgets", daemon=True)
                self._thread.start()
        self.wake()

    def discard(self, view: Updated) -> None:
        """Leave a view alone."""
        with self._lock:
            self._views.discard(view)
        self._wake.set()

    def wake(self) -> None:
        """Look soon: something is about to happen."""
        self._quiet_since = time.monotonic()
        self._wake.set()

    def __len__(self) -> int:
        return len(self._views)

    def _run(self) -> None:
        while True:
            with self._lock:
                views = list(self._views)
                if not views:
                    self._thread = None
                    return
            busy = [self._update(view) for view in views]
            if any(busy):
                self._quiet_since = time.monotonic()
            del views
            # `wake` may shorten a long pause, but never lifts the limit of four updates a second.
            time.sleep(INTERVAL)
            quiet = time.monotonic() - self._quiet_since
            if quiet > _IDLE_AFTER:
                self._wake.wait(IDLE_INTERVAL - INTERVAL)
            self._wake.clear()

    def _update(self, view: Updated) -> bool:
        """Update one view.  One that cannot be updated is left alone; the others go on."""
        try:
            return view.update()
        except Exception:  # noqa: BLE001 (whatever it is, the other views go on)
            _LOG.exception("%r is no longer kept up to date", view)
            with self._lock:
                self._views.discard(view)
            return False


SENDER = Sender()
"""The one of this process."""
