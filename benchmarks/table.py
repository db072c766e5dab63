"""Results as Markdown."""

from collections.abc import Iterator, Sequence
from statistics import mean, median

from benchmarks import goals
from benchmarks.results import Line, Results, Row
from benchmarks.summary import Comparison, Memory, peak, short

HEAD = """\
# Benchmarks

Written by `make bench BENCH=--write`. Both sides run in turns on the same cores; seconds are
medians of the rounds [least..most]; ratios above 1 mean that ours is faster. A goal is held
against the smaller of two ratios, that of seconds and that of seconds per token. The ratio of
seconds of processor time (CPU) stands beside them: it is the truer one where other work was going
on. Peers: trl's GRPOTrainer (grpo, learning; with long prompts in micro-batches of 8, or it takes
over 20 GB), the generate of transformers (sampling), a padded loop of peft (train). OpenMP's
threads soon sleep when they wait, on both sides: spinning, the peers took up to 60 times as long
beside any other work.
"""
FORMULA = """
Shares of the limits count the least work there is: 2 operations per weight of the layers for each
distinct token and per weight of the head for each position drawn from or trained, twice that for
training (forward, and backward through frozen weights), without attention, adapters and the draw
itself; reading counts the weights once per pass, without the cache.
"""


def markdown(results: Results) -> str:
    """All tables of a run."""
    facts = [{"": k, " ": v} for k, v in (results.machine | results.settings).items()]
    parts = [HEAD, *_table(facts)]
    if results.rows:
        parts += ["", "## Side by side", "", *_table([_speed(r) for r in results.rows])]
        memory = [m for m in map(_memory, results.rows) if m]
        parts += ["", "## Peak memory of a round", "", *_table(memory)] if memory else []
    if results.lines:
        parts += ["", "## Ours alone, and learning", "", *_table([_line(n) for n in results.lines])]
    if any(line.case == "limits" for line in results.lines):
        parts.append(FORMULA.rstrip())
    return "\n".join(parts) + "\n"


def _speed(row: Row) -> dict[str, str]:
    found = Comparison.of(row.ours, row.peer)
    verdicts = [
        f"{dtype}: {goals.SPEED[case, dtype].verdict(found.judged)}"
        for case, dtype in row.judged
        if (case, dtype) in goals.SPEED
    ]
    return {
        "case": row.case,
        "shape": row.shape,
        "dtype": row.dtype,
        "ours, s": str(found.ours),
        "peer, s": str(found.peer),
        "ratio": f"**{short(found.ratio)}**",
        "per token": short(found.per_token),
        "CPU": short(found.busy),
        "by round": f"{short(found.by_round.low)}..{short(found.by_round.high)}",
        "tokens": " / ".join(
            f"{mean(s.tokens for s in side):.0f}" for side in (row.ours, row.peer)
        ),
        "goals": "; ".join(verdicts),
        "notes": "; ".join(filter(None, [row.note, *_grpo(row)])),
    }


def _grpo(row: Row) -> Iterator[str]:
    """Notes on GRPO steps: groups with nothing to learn from, prompts, phases of ours."""
    sides = (row.ours, row.peer)
    if "without_signal" not in row.ours[0].extra:
        return
    ours, peer = (sum(s.extra["without_signal"] for s in side) for side in sides)
    yield f"groups without signal {ours} / {peer}"
    ours, peer = (mean(s.extra["prompt_tokens"] for s in side) for side in sides)
    yield f"prompts of {ours:.1f} / {peer:.1f} tokens"
    phases = row.ours[0].extra.get("phases", {})
    medians = {p: median(s.extra["phases"][p] for s in row.ours) for p in phases}
    yield "ours: " + ", ".join(f"{p} {short(s)} s" for p, s in medians.items())


def _memory(row: Row) -> dict[str, str]:
    """Peaks of a row; empty where they were not measured."""
    peaks = (peak(row.ours), peak(row.peer))
    if None in peaks or None in row.resident:
        return {}
    found = Memory(
        ours=int(peaks[0] or 0),
        peer=int(peaks[1] or 0),
        ours_growth=int(peaks[0] or 0) - int(row.resident[0] or 0),
        peer_growth=int(peaks[1] or 0) - int(row.resident[1] or 0),
    )
    judged = any(case == "grpo" for case, _ in row.judged)
    return {
        "case": row.case,
        "shape": row.shape,
        "dtype": row.dtype,
        "ours, MB": f"{found.ours / 1e6:.0f}",
        "peer, MB": f"{found.peer / 1e6:.0f}",
        "ours in peer": f"**{short(found.ratio)}**",
        "growth, MB": f"{found.ours_growth / 1e6:.0f} / {found.peer_growth / 1e6:.0f}",
        "growth in peer's": short(found.growth_ratio),
        "goals": goals.MEMORY.verdict(found.ratio) if judged else "",
    }


def _line(line: Line) -> dict[str, str]:
    return {"case": line.case, "what": line.what, "value": line.value, "goals": line.verdict}


def _table(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """Lines of one table; columns that are empty throughout are left out."""
    names = [n for n in rows[0] if n.strip() == "" or any(row[n] for row in rows)]
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield "| " + " | ".join(row[n].replace("|", "\\|") for n in names) + " |"
