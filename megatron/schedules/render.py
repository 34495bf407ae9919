"""Draw a schedule: a text grid of ops, a text or SVG timeline, a trace for ui.perfetto.dev."""

from __future__ import annotations

import json

from megatron.schedules.ops import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Schedule
from megatron.schedules.simulate import Simulation

_COLOURS = {FORWARD: "#7aa6da", BACKWARD: "#8cc98c", INPUT_GRAD: "#b5dba8", WEIGHT_GRAD: "#e0c36a"}


def op_grid(schedule: Schedule, mark: tuple[int, int] | None = None, window: int = 10) -> str:
    """A line per rank with its ops in order. `mark` = (rank, index) is shown as >>op<<, with `window` ops either side.

    The lines are aligned by index, not by time: this form also draws a schedule that cannot run.
    """
    first, last = (0, max(map(len, schedule.ranks))) if mark is None else (mark[1] - window, mark[1] + window + 1)
    first = max(first, 0)
    rows = []
    for rank, ops in enumerate(schedule.ranks):
        words = [str(op) for op in ops[first:last]]
        if mark is not None and mark[0] == rank:
            position = mark[1] - first
            words[position : position + 1] = [f">>{words[position] if position < len(words) else 'end'}<<"]
        rows.append(words)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    lines = []
    for rank, (row, ops) in enumerate(zip(rows, schedule.ranks)):
        body = " ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip()
        lines.append(f"rank {rank}: {'... ' if first else ''}{body}{' ...' if last < len(ops) else ''}")
    return "\n".join(lines)


def timeline(simulation: Simulation, step_s: float = 1.0) -> str:
    """A line per rank, a column of time per `step_s`: `F0.0` where an op starts, `-` while it runs, `.` while idle."""
    width = 1 + max(len(str(span.op)) for spans in simulation.spans for span in spans)
    num_columns = round(simulation.makespan / step_s)
    lines = []
    for rank, spans in enumerate(simulation.spans):
        cells = ["."] * num_columns
        for span in spans:
            start, end = round(span.start / step_s), round(span.end / step_s)
            cells[start:end] = [str(span.op), *["-"] * (end - start - 1)][: max(end - start, 0)]
        lines.append(f"rank {rank}: " + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def svg(simulation: Simulation, width: int = 1200, row_height: int = 28) -> str:
    """A standalone SVG picture, a row per rank, time to the right; darker is a later chunk."""
    scale = width / simulation.makespan
    height = row_height * len(simulation.spans)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 70}" height="{height + 30}" '
        f'font-family="sans-serif">',
        f'<text x="60" y="{height + 20}" font-size="12">{simulation.schedule.num_microbatches} microbatches, '
        f"bubble {100 * simulation.bubble:.1f}%, peak live {max(simulation.peak_live)}</text>",
    ]
    for rank, spans in enumerate(simulation.spans):
        y = rank * row_height
        parts.append(f'<text x="4" y="{y + row_height * 0.65:.0f}" font-size="12">rank {rank}</text>')
        for span in spans:
            x, length = 60 + span.start * scale, (span.end - span.start) * scale
            shade = 1 - 0.6 * span.op.chunk / simulation.schedule.num_chunks
            parts.append(
                f'<rect x="{x:.2f}" y="{y + 1}" width="{length:.2f}" height="{row_height - 2}" stroke="white" '
                f'fill="{_COLOURS[span.op.kind]}" fill-opacity="{shade:.2f}"><title>{span.op} {span.start:g} to '
                f"{span.end:g}</title></rect>"
            )
            if length > 14:
                parts.append(
                    f'<text x="{x + length / 2:.2f}" y="{y + row_height * 0.65:.0f}" font-size="11" '
                    f'text-anchor="middle">{span.op.microbatch}</text>'
                )
    return "\n".join([*parts, "</svg>", ""])


def perfetto(simulation: Simulation, second_us: float = 1e6) -> str:
    """Chrome trace-event JSON: a process per rank, a slice per op; opens in ui.perfetto.dev."""
    events: list[dict[str, object]] = []
    for rank, spans in enumerate(simulation.spans):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pipeline rank {rank}"}})
        events.extend(
            {
                "ph": "X",
                "name": str(span.op),
                "cat": span.op.kind,
                "pid": rank,
                "tid": 0,
                "ts": span.start * second_us,
                "dur": (span.end - span.start) * second_us,
            }
            for span in spans
        )
    return json.dumps({"traceEvents": events})
