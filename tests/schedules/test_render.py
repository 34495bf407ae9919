"""Pictures of schedules."""

from __future__ import annotations

import json
import xml.etree.ElementTree

from megatron.schedules.generators import build_schedule
from megatron.schedules.render import op_grid, perfetto, svg, timeline
from megatron.schedules.simulate import simulate


def test_timeline():
    assert timeline(simulate(build_schedule("1f1b", 2, 2))).splitlines() == [
        "rank 0: F0.0 F1.0 .    .    B0.0 -    .    B1.0 -",
        "rank 1: .    F0.0 B0.0 -    F1.0 B1.0 -    .    .",
    ]


def test_marked_grid_shows_the_neighbourhood():
    schedule = build_schedule("1f1b", 2, 40).compute_only()
    first, second = op_grid(schedule, mark=(1, 20), window=2).splitlines()
    assert first == "rank 0: ... B8.0 F10.0 B9.0      F11.0 B10.0 ..."
    assert second == "rank 1: ... F9.0 B9.0  >>F10.0<< B10.0 F11.0 ..."
    assert op_grid(build_schedule("gpipe", 1, 2)) == "rank 0: F0.0 F1.0 B0.0 B1.0"


def test_svg_and_trace_hold_every_op():
    simulation = simulate(build_schedule("1f1b", 4, 8, 2))
    root = xml.etree.ElementTree.fromstring(svg(simulation))
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == 4 * 2 * 8 * 2
    events = [event for event in json.loads(perfetto(simulation))["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 4 * 2 * 8 * 2
    assert max(event["ts"] + event["dur"] for event in events) == simulation.makespan * 1e6
