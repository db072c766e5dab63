"""Where the time of a step goes."""

import time


class Clock:
    """A stopwatch with laps.

    >>> clock = Clock()
    >>> clock.lap("sample")
    >>> sorted(clock.metrics(tokens=3))
    ['seconds:sample', 'seconds:total', 'tokens_per_second']
    """

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Book the time since the last lap under ``name``."""
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def metrics(self, tokens: int) -> dict[str, float]:
        """Seconds by name and in total, and tokens per second.

        Args:
            tokens: number of tokens that the whole step was about.
        """
        total = time.perf_counter() - self._start
        seconds = {f"seconds:{name}": value for name, value in self._laps.items()}
        return {**seconds, "seconds:total": total, "tokens_per_second": tokens / max(total, 1e-9)}
