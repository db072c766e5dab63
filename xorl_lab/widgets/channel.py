"""A widget that only ever answers what its page asks."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import traitlets

from xorl_lab.errors import LabError

Answer = Mapping[str, Any]
"""JSON values; ``error`` says in words why there is nothing else."""


class Channel(anywidget.AnyWidget):
    """Requests of a page, answered one by one, while a cell blocks too.

    ipykernel 7.4 sends what a page says on a channel to the thread that last spoke on it, and
    everything that was made or updated in a cell spoke from the main thread, which is busy while a
    cell runs.  So nothing is ever said here but in answer to the page, and the route is left to the
    page (:meth:`_unbind`).

    The page's half is ``widgets/src/channel.js``.

    Args:
        state: initial values of traits.
    """

    group = traitlets.Unicode().tag(sync=True)
    """What the widgets of one view are called in the page."""

    def __init__(self, **state: Any) -> None:  # noqa: ANN401 (traits)
        self.answered = threading.Event()
        """Set once a page has been heard of."""
        self.pages: set[str] = set()
        """Those that were heard of; a page that is loaded again is another one."""
        super().__init__(**state)
        self.on_msg(self._hear)
        self._unbind()

    def close(self) -> None:
        """Free the widget here and in the page."""
        if self.layout is not None:
            self.layout.close()
        super().close()

    def answer(self, content: Mapping[str, Any], buffers: list[bytes]) -> Answer | None:
        """What the page is told.

        Args:
            content: the request; its ``kind`` says what is asked for.
            buffers: to be filled with what is big.

        Returns:
            The answer; None if :meth:`later` gives it.
        """
        raise NotImplementedError

    def later(self, content: Mapping[str, Any], work: Callable[[list[bytes]], Answer]) -> None:
        """Answer from a thread of its own: work that takes more than a moment.

        Args:
            content: the request.
            work: fills the buffers that it is given and returns the answer.
        """
        threading.Thread(
            target=self._reply, args=(content, work), name="xorl-lab-answer", daemon=True
        ).start()

    def _hear(self, _widget: object, content: Mapping[str, Any], _buffers: object) -> None:
        self.answered.set()
        self.pages.add(str(content.get("id", "")).partition("-")[0])
        self._reply(content, lambda buffers: self.answer(content, buffers))

    def _reply(
        self, content: Mapping[str, Any], work: Callable[[list[bytes]], Answer | None]
    ) -> None:
        buffers: list[bytes] = []
        try:
            answer = work(buffers)
        except Exception as error:  # noqa: BLE001 (an answer is due, whatever goes wrong)
            text = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
            answer = {"error": text}
            buffers = []
        if answer is None or self.comm is None:  # closed meanwhile
            return
        self.send({"kind": "answer", "id": content.get("id"), **answer}, buffers)
        self._unbind()

    def _unbind(self) -> None:
        """Let ipykernel 7.4 forget which thread spoke here last; other versions know no such thing.

        Without this a click is put before the main thread, and waits until the cell is done.
        """
        if self.comm is not None:
            vars(self.comm).pop("_reply_subshell_id", None)
