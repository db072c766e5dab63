"""The rollouts of runs: a table of all, and every token of each."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import traitlets

from xorl_lab.errors import ConfigError, LabError
from xorl_lab.widgets.bundle import script
from xorl_lab.widgets.channel import Answer, Channel
from xorl_lab.widgets.datum_source import datum_source
from xorl_lab.widgets.findings import GROUP_SCALARS, Findings, Wish
from xorl_lab.widgets.inspector_still import inert, still_html
from xorl_lab.widgets.tokens import Spelling, rollout_answer, sequence_answer
from xorl_lab.widgets.view import View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xorl_lab.store import Reader
    from xorl_lab.types import InspectorCommands

NO_COMMANDS = (
    "No model is at hand here, so nothing can be drawn: open the rollouts from a Lab with this "
    "model."
)
_PARAMS: Mapping[str, Callable[[Any], Any]] = {
    "n": int,
    "max_tokens": int,
    "temperature": float,
    "seed": int,
}


class Rollouts(Channel):
    """Answers what a page asks about the rollouts of runs.

    Args:
        readers: of R runs.
        commands: that know the tokenizer and can draw; None: neither.
    """

    _esm = script("inspector")
    setup: Any = traitlets.Dict().tag(sync=True)
    """What there is to ask about: ``runs``, and ``reason``, why nothing can be drawn."""

    def __init__(
        self, readers: "Sequence[Reader]", commands: "InspectorCommands | None" = None
    ) -> None:
        self._readers = list(readers)
        self._commands = commands
        self._findings = Findings(readers)
        self._spelling = Spelling(commands)
        runs = [{"name": r.info.name, "kind": r.info.kind, "model": r.info.model} for r in readers]
        super().__init__(
            setup={"runs": runs, "reason": "" if commands is not None else NO_COMMANDS}
        )

    def answer(self, content: Mapping[str, Any], buffers: list[bytes]) -> Answer | None:
        """Look it up; what may take long is answered by a thread of its own."""
        kind = content.get("kind")
        slow: dict[object, Callable[[list[bytes]], Answer]] = {
            "query": lambda _: self._query(content),
            "rollout": lambda out: self._rollout(content["run"], content["rollout"], out),
            "same": lambda _: self._same(content["run"], content["rollout"]),
            "resample": lambda out: self._resample(content, out),
            "weights": lambda _: {"weights": self._weights()},
        }
        if kind in slow:
            self.later(content, slow[kind])
            return None
        if kind == "page":
            return self._findings.page(content["key"], content["start"], content["count"])
        if kind == "changed":
            return self._changed(content)
        if kind == "annotate":
            return self._annotate(content)
        if kind == "datum":
            return {
                "source": datum_source(self._readers[content["run"]].rollout(content["rollout"]))
            }
        return {} if kind == "hello" else {"error": f"nothing is known about {kind!r}"}

    def _rollout(self, run: int, id: int, buffers: list[bytes]) -> Answer:  # noqa: A002
        return rollout_answer(self._readers[run], id, self._spelling, buffers) | {"run": run}

    def _query(self, content: Mapping[str, Any]) -> Answer:
        columns = dict.fromkeys(name for r in self._readers for name in r.rollout_columns())
        words = {"columns": list(columns), "group_columns": list(GROUP_SCALARS)}
        return self._findings.ask(Wish.of(content)) | words

    def _changed(self, content: Mapping[str, Any]) -> Answer:
        version = self._findings.changed()
        if version == content.get("version"):
            return {"version": version}
        return {"version": version, "count": self._findings.count(Wish.of(content))}

    def _same(self, run: int, id: int) -> Answer:  # noqa: A002
        ids = np.array(self._readers[run].same_prompt(id), np.int64)
        rows = self._findings.rows(np.full(len(ids), run, np.int32), ids)
        names = ("run", "id", "step", "sample", "reward", "length", "stop_reason", "failed", "text")
        return {"columns": {name: rows[name] for name in names}}

    def _annotate(self, content: Mapping[str, Any]) -> Answer:
        note = self._readers[content["run"]].annotate(
            content["rollout"], tags=content.get("tags"), note=content.get("note")
        )
        return {"tags": list(note.tags), "note": note.note}

    def _weights(self) -> list[str]:
        return [] if self._commands is None else list(self._commands.weights())

    def _resample(self, content: Mapping[str, Any], buffers: list[bytes]) -> Answer:
        if self._commands is None:
            return {"error": NO_COMMANDS}
        given = content.get("params") or {}
        params = {n: as_(given[n]) for n, as_ in _PARAMS.items() if given.get(n) is not None}
        drawn = self._commands.resample(
            int(content["rollout"]), int(content["position"]), str(content["weights"]), params
        )
        return {"drawn": [sequence_answer(one, self._spelling, buffers) for one in drawn]}

    def __repr__(self) -> str:
        return f"Rollouts({', '.join(reader.info.name for reader in self._readers)})"


class RolloutInspector(View):
    """A table of all rollouts of runs, and the tokens of one with all that is known of them.

    Args:
        readers: of the runs.
        commands: that know the tokenizer and can go on from a token; without them tokens are shown
            as ids, and nothing can be drawn.

    Raises:
        ConfigError: there is no run.
    """

    endless = True

    def __init__(
        self, readers: "Sequence[Reader]", commands: "InspectorCommands | None" = None
    ) -> None:
        if not readers:
            raise ConfigError("there are no runs to inspect: pass at least one reader")
        self._readers = list(readers)
        self.rollouts = Rollouts(readers, commands)
        """What answers the page."""
        super().__init__([self.rollouts])

    def still(self) -> str:
        """The best, the worst and the latest rollouts with their texts."""
        return "".join(still_html(reader) for reader in self._readers)

    def __repr__(self) -> str:
        counts = [f"{r.info.name}: {_count(r)}" for r in self._readers]
        return f"RolloutInspector({inert(', '.join(counts))})"


def _count(reader: "Reader") -> str:
    try:
        number = reader.count()
    except LabError as error:  # a repr says what it can
        return str(error)
    return f"{number} rollout{'' if number == 1 else 's'}"
