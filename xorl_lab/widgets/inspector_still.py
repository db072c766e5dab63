"""What a saved notebook keeps of the rollouts of a run: a table of some, with their texts."""

import html
from typing import TYPE_CHECKING, Any

from xorl_lab.widgets.fallback import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xorl_lab.store import Reader

_EACH = 3
_CHARS = 600
_NAMES = {
    **{code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)},
    0x7F: "␡",
}
_HIDDEN = (
    *((0x80, 0x9F), (0xAD, 0xAD), (0x61C, 0x61C), (0x180E, 0x180E), (0x200B, 0x200B)),
    *((0x200E, 0x200F), (0x2028, 0x202E), (0x2060, 0x206F), (0xFEFF, 0xFEFF), (0xFFF9, 0xFFFB)),
)


def still_html(reader: "Reader") -> str:
    """Best, worst and latest rollouts of a run as HTML that any page shows, all text escaped.

    Texts stand in ``<pre>``, where no page looks for formulas.

    Args:
        reader: of the run.
    """
    total = reader.count()
    name = html.escape(inert(reader.info.name))
    head = f"<b><code>{name}</code></b>: {total} rollout{'' if total == 1 else 's'}"
    if not total:
        return f"<div><p>{head}</p></div>"
    best = reader.ids(order_by="reward", descending=True)[:_EACH].tolist()
    worst = reader.ids(order_by="reward", where=[("reward", "!=", None)])[:_EACH].tolist()
    newest = reader.ids(order_by="id", descending=True)[:_EACH].tolist()
    chosen: dict[int, str] = {}
    for kind, ids in (("best", best), ("worst", worst), ("latest", newest)):
        for i in ids:
            chosen.setdefault(i, kind)
    rows = _rows(reader, chosen)
    titles = ("", "step", "reward", "advantage", "tokens", "ended by", "prompt", "completion")
    cells = "".join(f"<th>{title}</th>" for title in titles)
    return f"<div><p>{head}</p><table><tr>{cells}</tr>{rows}</table></div>"


def _rows(reader: "Reader", chosen: dict[int, str]) -> str:
    columns = reader.table(list(chosen), chars=_CHARS + 1)
    kinds: Sequence[str] = list(chosen.values())
    return "".join(
        f"<tr><td>{kind}</td><td>{columns['step'][i]}</td><td>{_value(columns['reward'][i])}</td>"
        f"<td>{_value(columns['advantage'][i])}</td><td>{columns['length'][i]}</td>"
        f"<td>{html.escape(str(columns['stop_reason'][i]))}</td>"
        f"<td>{_text(columns['prompt'][i])}</td><td>{_text(columns['text'][i])}</td></tr>"
        for i, kind in enumerate(kinds)
    )


def _value(value: float | None) -> str:
    return "–" if value is None else number(float(value))


def _text(text: Any) -> str:  # noqa: ANN401 (a cell of a table)
    """Some text in which nothing acts: markup, formulas, direction and control characters."""
    plain = str(text or "")
    if len(plain) > _CHARS:
        plain = plain[:_CHARS] + " …"
    return f"<pre>{html.escape(inert(plain))}</pre>"


def inert(text: str) -> str:
    r"""Text whose control characters and invisible signs are written out.

    >>> inert("a\u202eb\x1b[0m")
    'a⟨U+202E⟩b␛[0m'
    """
    return "".join(_sign(c) for c in text)


def _sign(char: str) -> str:
    code = ord(char)
    if code in _NAMES:
        return _NAMES[code]
    if any(low <= code <= high for low, high in _HIDDEN):
        return f"⟨U+{code:04X}⟩"
    return char
