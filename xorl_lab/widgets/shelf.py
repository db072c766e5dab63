"""Browser of checkpoints: where each comes from, what it achieved, and what can be done with it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import traitlets

from xorl_lab.widgets import shelf_still, shelf_wire
from xorl_lab.widgets.bundle import script
from xorl_lab.widgets.channel import Answer, Channel
from xorl_lab.widgets.view import View

if TYPE_CHECKING:
    from xorl_lab.types import CheckpointCommands


class Shelf(Channel):
    """The widget: asks its commands for what the page asks for.

    Args:
        commands: whose checkpoints these are.
    """

    _esm = script("shelf")
    first: Any = traitlets.Dict().tag(sync=True)
    """The checkpoints when the widget was made; the page asks for what came later."""

    def __init__(self, commands: "CheckpointCommands") -> None:
        self._commands = commands
        self._names: dict[str, str] = {}
        self._works: Mapping[str, Callable[[Mapping[str, Any]], Answer]] = {
            "tree": self._tree,
            "load": self._load,
            "branch": self._branch,
            "sample": self._sample,
            "compare": self._side_by_side,
            "delete": self._delete,
            "export": self._export,
        }
        super().__init__(first=self._tree({}))

    def answer(self, content: Mapping[str, Any], buffers: list[bytes]) -> Answer | None:
        """Whatever takes more than a moment is done in a thread of its own."""
        del buffers
        kind = content.get("kind")
        if kind == "hello":
            return {}
        work = self._works.get(str(kind))
        if work is None:
            return {"error": f"{kind!r} is no request: pass one of {', '.join(self._works)}"}
        self.later(content, lambda _buffers: work(content))
        return None

    def _tree(self, content: Mapping[str, Any]) -> Answer:
        tree = self._commands.tree()
        self._names = {shelf_wire.plain(c["name"]): c["name"] for c in tree["checkpoints"]}
        mark, packed = shelf_wire.pack(tree)
        return {"mark": mark} if mark == content.get("seen") else {"mark": mark, "tree": packed}

    def _load(self, content: Mapping[str, Any]) -> Answer:
        return {"said": shelf_wire.plain(self._commands.load(self._name(content)))}

    def _branch(self, content: Mapping[str, Any]) -> Answer:
        changes = shelf_wire.changes(content["fields"], str(content["lines"]))
        return {"run": shelf_wire.plain(self._commands.branch(self._name(content), changes))}

    def _sample(self, content: Mapping[str, Any]) -> Answer:
        params = shelf_wire.parameters(content["params"])
        found = self._commands.sample(self._name(content), str(content["prompt"]), params)
        return {"samples": shelf_wire.sequences(found)}

    def _side_by_side(self, content: Mapping[str, Any]) -> Answer:
        params = shelf_wire.parameters(content["params"])
        left, right = self._name(content, "left"), self._name(content, "right")
        prompts = [str(prompt) for prompt in content["prompts"]]
        found = self._commands.compare(left, right, prompts, params)
        return {"results": shelf_wire.plain(found)}

    def _delete(self, content: Mapping[str, Any]) -> Answer:
        self._commands.delete(self._name(content))
        return {}

    def _export(self, content: Mapping[str, Any]) -> Answer:
        folder, form = str(content["folder"]), str(content["form"])
        return {"path": shelf_wire.plain(self._commands.export(self._name(content), folder, form))}

    def _name(self, content: Mapping[str, Any], field: str = "checkpoint") -> str:
        """The name that is meant; the page may have been told it in another form."""
        told = str(content[field])
        return self._names.get(told, told)


class CheckpointBrowser(View):
    """All checkpoints by lineage, to sort, compare, go back to and go on from.

    Args:
        commands: whose checkpoints these are, and what is done with them.
    """

    endless = True

    def __init__(self, commands: "CheckpointCommands") -> None:
        self._commands = commands
        self.shelf = Shelf(commands)
        """The widget."""
        super().__init__([self.shelf])

    def still(self) -> str:
        """A table of the checkpoints, and what they take on the disk."""
        return shelf_still.still_html(self._commands.tree())

    def __repr__(self) -> str:
        return f"CheckpointBrowser({shelf_still.counted(self._commands.tree())})"
