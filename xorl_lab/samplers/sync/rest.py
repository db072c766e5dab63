"""Bringing a server to rest: nothing is under way while its weights are replaced."""

import contextlib
import threading
import time

from xorl_lab.errors import SamplerError
from xorl_lab.samplers.sync.parties import Server

LOOK = 0.05
"""Seconds between looks whether requests have ended."""


class Traffic:
    """The requests of this process that belong to the weights a server has now."""

    def __init__(self) -> None:
        self._count = 0
        self._ended = threading.Condition()

    @property
    def under_way(self) -> int:
        """Requests that have begun and have not ended."""
        return self._count

    def begin(self, requests: int) -> None:
        """Requests are about to be sent."""
        with self._ended:
            self._count += requests

    def end(self) -> None:
        """One of them was answered."""
        with self._ended:
            self._count -= 1
            self._ended.notify_all()

    def bring_to_rest(self, server: Server, patience: float) -> bool:
        """Pause a server with nothing under way, and its prefix cache empty.

        Whether something is under way only the server knows, as others use it too: paused where it
        stands, it refuses to flush its cache as long as it has begun anything.

        Args:
            server: to be paused.
            patience: seconds to wait for what is under way.

        Returns:
            True if that did not end in time: it goes on behind the pause, so it mixes versions.

        Raises:
            SamplerError: the server is gone.
        """
        end = time.monotonic() + patience
        with self._ended:
            self._ended.wait_for(lambda: self._count <= 0, patience)
        try:
            while True:
                server.pause("in_place")
                try:
                    server.flush_cache(0.0)
                except SamplerError:
                    if time.monotonic() >= end:
                        break
                else:
                    return False
                server.resume()
                time.sleep(LOOK)
            server.pause("retract")
            server.flush_cache()
        except BaseException:
            # Its weights are whole: nobody is to wait for what does not come.
            with contextlib.suppress(SamplerError):
                server.resume()
            raise
        return True
