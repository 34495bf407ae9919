"""The account against an independent one: categories tile the wall clock, and lost steps are the undone ones."""

import json
import random

import pytest

from megatron.ledger.events import Event, parse_lines, read
from megatron.ledger.goodput import account, tile
from megatron.ledger.writer import Ledger


class Clock:
    """A clock that moves only when told, as monotonic and as wall time."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def open_ledger(path, clock, **fields):
    return Ledger(path, clock=clock, wall=clock, **fields)


def test_phases_nest_and_tile_the_wall_clock(tmp_path):
    clock, path = Clock(), tmp_path / "ledger.jsonl"
    ledger = open_ledger(path, clock)
    clock.now += 1  # other
    with ledger.phase("init"):
        clock.now += 5
        with ledger.phase("load"):
            clock.now += 2
        clock.now += 1
    ledger.mark("loaded", step=0)
    for step in (1, 2, 3):
        with ledger.phase("step", step=step):
            with ledger.phase("data"):
                clock.now += 0.25
            clock.now += 4
    with ledger.phase("save"):
        clock.now += 3
    ledger.close("done", 3)
    result = account(read(path))
    assert result.seconds == pytest.approx(
        {
            "other": 1,
            "init": 6,
            "load": 2,
            "data": 0.75,
            "warmup": 4,
            "productive": 8,
            "save": 3,
            "lost": 0,
            "eval": 0,
            "log": 0,
            "down": 0,
        }
    )
    assert result.wall == pytest.approx(sum(result.seconds.values())) == clock.now - 1000
    assert ledger.totals() == pytest.approx({"other": 1, "init": 6, "load": 2, "step": 12, "data": 0.75, "save": 3})
    assert result.goodput == pytest.approx(8 / result.wall)
    assert "goodput" in result.render()


def test_an_exception_ends_the_phase_and_a_dead_process_is_followed_by_down_time(tmp_path):
    clock, path = Clock(), tmp_path / "ledger.jsonl"
    ledger = open_ledger(path, clock)
    ledger.mark("loaded", step=0)
    with pytest.raises(RuntimeError):
        with ledger.phase("step", step=1):
            clock.now += 2
            raise RuntimeError
    for step in (2, 3):
        with ledger.phase("step", step=step):
            clock.now += 2
    with open(path, "a") as file:
        file.write('{"t": 10, "se')  # killed while writing
    clock.now += 7
    ledger = open_ledger(path, clock)
    assert ledger.incarnation == 1
    ledger.mark("loaded", step=2)
    with ledger.phase("step", step=3):
        clock.now += 2
    result = account(read(path))
    assert result.seconds["down"] == pytest.approx(7)
    assert result.seconds["lost"] == pytest.approx(2)  # step 3 of the first life
    assert result.seconds["warmup"] == pytest.approx(4)
    assert result.seconds["productive"] == pytest.approx(2)


def random_history(seed):
    """Events of a run with crashes and its own account of where the time went."""
    draw = random.Random(seed)
    now, inc, durable, events = 1000.0, 0, 0, []
    truth = dict.fromkeys(("productive", "warmup", "lost", "data", "save", "load", "init", "down", "other"), 0.0)
    done = {}  # step -> (category, seconds) not undone yet
    for inc in range(draw.randint(1, 5)):
        seq = 0

        def emit(ev, seq, **fields):
            events.append(Event(now, seq, inc, ev, fields))  # noqa: B023
            return seq + 1

        if inc:
            pause = draw.choice([0.0, 3.5])
            now += pause
            truth["down"] += pause
        seq = emit("start", seq, step=0)
        seq = emit("enter", seq, phase="init")
        for phase in ("init", "load"):
            spent = draw.random()
            if phase == "load":
                seq = emit("enter", seq, phase="load")
            now += spent
            truth[phase] += spent
        seq = emit("exit", seq, phase="load")
        seq = emit("exit", seq, phase="init")
        seq = emit("loaded", seq, step=durable)
        for step in [step for step in done if step > durable]:
            category, spent = done.pop(step)
            truth[category] -= spent
            truth["lost"] += spent
        step = durable
        for ordinal in range(draw.randint(0, 6)):
            step += 1
            seq = emit("enter", seq, phase="step", step=step)
            seq = emit("enter", seq, phase="data")
            waited = draw.choice([0.0, 0.3])
            now += waited
            truth["data"] += waited
            seq = emit("exit", seq, phase="data")
            spent = draw.random()
            now += spent
            category = "productive" if ordinal else "warmup"
            truth[category] += spent
            done[step] = (category, spent)
            seq = emit("exit", seq, phase="step")
            if draw.random() < 0.4:
                seq = emit("enter", seq, phase="save")
                now += 0.5
                truth["save"] += 0.5
                seq = emit("exit", seq, phase="save")
                seq = emit("durable", seq, step=step)
                durable = step
    draw.shuffle(events)
    return events, truth, now - 1000.0


def test_account_of_random_histories():
    for seed in range(500):
        events, truth, wall = random_history(seed)
        result = account(events)
        for category, seconds in truth.items():
            assert result.seconds[category] == pytest.approx(seconds, abs=1e-6), (seed, category)
        assert result.wall == pytest.approx(wall)
        intervals = tile(events)
        assert all(before.end == after.begin for before, after in zip(intervals, intervals[1:]))


def test_listeners_hear_the_phase_that_runs():
    heard = []
    ledger = Ledger(None, listeners=[heard.append])
    with ledger.phase("step"), ledger.phase("data"):
        pass
    assert heard == ["step", "data", "step", "other"]


def test_unknown_phases_kinds_and_broken_lines_are_named(tmp_path):
    with pytest.raises(ValueError, match="nonsense"):
        with Ledger(None).phase("nonsense"):
            pass
    good = json.dumps({"t": 1, "seq": 0, "inc": 0, "ev": "start"})
    with pytest.raises(ValueError, match="x:1.*not a ledger event"):
        parse_lines(['{"t": 1}', good], "x")
    with pytest.raises(ValueError, match="unknown kind"):
        parse_lines(['{"t": 1, "seq": 0, "inc": 0, "ev": "party"}'])
    assert account([]).wall == 0
