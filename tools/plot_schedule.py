#!/usr/bin/env python3
"""Draw a pipeline schedule: a text timeline, its bubble and live microbatches, and an SVG or a Perfetto trace.

    python tools/plot_schedule.py --schedule 1f1b --pp 4 --microbatches 8 --vpp 2 --output schedule.svg
    python tools/plot_schedule.py --file mine.txt --output schedule.json

A forward of one chunk takes one column, a backward two; messages take no time. Needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.schedules.generators import build_schedule, schedule_names  # noqa: E402
from megatron.schedules.ops import Schedule, parse_schedule  # noqa: E402
from megatron.schedules.passes import check  # noqa: E402
from megatron.schedules.render import perfetto, svg, timeline  # noqa: E402
from megatron.schedules.simulate import simulate  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Print the timeline; write the picture if asked. Returns the exit code: 2 for a schedule that is refused."""
    arguments = _parser().parse_args(argv)
    try:
        schedule = _schedule(arguments)
    except (OSError, ValueError) as error:
        print(f"plot_schedule: {error}", file=sys.stderr)
        return 2
    simulation = simulate(schedule)
    print(timeline(simulation))
    print(
        f"{schedule.num_stages} stages x {schedule.num_chunks} chunks, {schedule.num_microbatches} microbatches: "
        f"makespan {simulation.makespan:g}, bubble {100 * simulation.bubble:.1f}%, "
        f"live microbatch-chunks per rank {' '.join(map(str, simulation.peak_live))}"
    )
    if arguments.ops:
        print(schedule, end="")
    if arguments.output is not None:
        draw = {".svg": svg, ".json": perfetto}[arguments.output.suffix]
        arguments.output.write_text(draw(simulation), encoding="utf-8")
        print(f"wrote {arguments.output}")
    return 0


def _schedule(arguments: argparse.Namespace) -> Schedule:
    if arguments.file is None:
        return build_schedule(
            arguments.schedule, arguments.pp, arguments.microbatches, arguments.vpp, arguments.group_size
        )
    schedule = parse_schedule(arguments.file.read_text(encoding="utf-8"))
    check(schedule)
    return schedule


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".svg", ".json"):
        raise argparse.ArgumentTypeError(f"{text} must end in .svg (picture) or .json (trace for ui.perfetto.dev)")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=schedule_names(), default="1f1b", help="default 1f1b")
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks (default 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="per step (default 8)")
    parser.add_argument("--vpp", type=int, default=1, help="model chunks per rank (default 1)")
    parser.add_argument("--group-size", type=int, help="microbatches per turn of a chunk (default: --pp)")
    parser.add_argument("--file", type=Path, help="draw this text file, a line of ops per rank, instead")
    parser.add_argument("--ops", action="store_true", help="also print every rank's ops, messages included")
    parser.add_argument("--output", type=_picture, help="write a .svg picture or a .json trace here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
