"""The in-process process group: right results, and every misuse reported by name."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.helpers.meeting import CommunicationError, Meeting, PeerFailed
from tests.helpers.thread_transport import ThreadTransport


def run(size, fn, timeout_s=20.0):
    """fn(transport) on `size` threads; results in rank order, the first real error raised."""
    meeting = Meeting(size, timeout_s)
    results, errors = [None] * size, []

    def body(rank):
        try:
            results[rank] = fn(ThreadTransport(meeting, "tp", tuple(range(size)), rank))
            meeting.finish(rank)
        except Exception as error:
            errors.append(error)
            meeting.fail(rank, error)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, PeerFailed)]
    if real:
        raise real[0]
    if meeting.failure:
        raise CommunicationError(meeting.failure)
    return results


def test_collectives_give_what_their_names_say():
    def body(group):
        mine = torch.arange(4.0) + 10 * group.rank
        total = mine.clone()
        group.all_reduce_(total, "sum").wait()
        high = mine.clone()
        group.all_reduce_(high, "max").wait()
        gathered = torch.empty(12)
        group.all_gather_into_(gathered, mine).wait()
        scattered = torch.empty(2)
        group.reduce_scatter_into_(scattered, torch.arange(6.0) * (group.rank + 1)).wait()
        sent = mine.clone()
        group.broadcast_(sent, 1).wait()
        rows = torch.empty(3)
        group.all_to_all_(rows, torch.full((3,), float(group.rank)), [1, 1, 1], [1, 1, 1]).wait()
        group.barrier()
        return total, high, gathered, scattered, sent, rows, group.all_gather_object({"rank": group.rank})

    for rank, (total, high, gathered, scattered, sent, rows, objects) in enumerate(run(3, body)):
        assert torch.equal(total, 3 * torch.arange(4.0) + 30)
        assert torch.equal(high, torch.arange(4.0) + 20)
        assert torch.equal(gathered, torch.cat([torch.arange(4.0) + 10 * r for r in range(3)]))
        assert torch.equal(scattered, 6 * torch.arange(6.0)[2 * rank : 2 * rank + 2])
        assert torch.equal(sent, torch.arange(4.0) + 10)
        assert torch.equal(rows, torch.arange(3.0))
        assert objects == [{"rank": r} for r in range(3)]


def test_uneven_all_to_all():
    sizes = [[1, 2], [0, 3]]  # sizes[sender][receiver]

    def body(group):
        source = torch.full((sum(sizes[group.rank]), 2), float(group.rank))
        wanted = [sizes[sender][group.rank] for sender in range(2)]
        out = torch.empty(sum(wanted), 2)
        group.all_to_all_(out, source, wanted, sizes[group.rank]).wait()
        return out[:, 0].tolist()

    assert run(2, body) == [[0.0], [0.0, 0.0, 1.0, 1.0, 1.0]]


def test_reductions_add_in_rank_order():
    values = [1.0, 1e8, -1e8, 3.0, 0.1, 7e7, -5.0, 2.5]

    def body(group):
        time.sleep(0.001 * ((group.rank * 5) % 8))
        x = torch.tensor([values[group.rank]])
        group.all_reduce_(x, "sum").wait()
        return x

    expected = torch.tensor([values[0]])
    for value in values[1:]:
        expected = expected + torch.tensor([value])
    for _ in range(3):
        assert all(torch.equal(x, expected) for x in run(8, body))


def test_buffers_are_poisoned_until_wait():
    def body(group):
        x, out = torch.ones(3), torch.zeros(6, dtype=torch.int64)
        first = group.all_reduce_(x, "sum")
        second = group.all_gather_into_(out, torch.ones(3, dtype=torch.int64))
        early = x.isnan().all().item(), (out < 0).all().item()
        first.wait()
        second.wait()
        return early, x.tolist(), out.tolist()

    assert run(2, body) == [((True, True), [2.0] * 3, [1] * 6)] * 2


def test_shards_may_live_inside_the_whole():
    def body(group):
        flat = torch.arange(4.0) * (group.rank + 1)
        mine = flat[2 * group.rank : 2 * group.rank + 2]
        group.reduce_scatter_into_(mine, flat).wait()
        group.all_gather_into_(flat, mine).wait()
        return flat

    assert all(torch.equal(flat, 3 * torch.arange(4.0)) for flat in run(2, body))


def test_changing_an_input_before_wait_is_an_error():
    def body(group):
        shard = torch.ones(2)
        work = group.all_gather_into_(torch.empty(4), shard)
        if group.rank == 1:
            shard.add_(1)
        work.wait()

    with pytest.raises(CommunicationError, match=r"rank 1 changed the input of all_gather"):
        run(2, body)


def test_messages_match_in_order_and_never_block_the_sender():
    def body(group):
        other = 1 - group.rank
        works = group.exchange([(other, torch.tensor([1.0])), (other, torch.tensor([2.0]))], [])
        first, second = torch.empty(1), torch.empty(1)
        works += group.exchange([], [(other, first), (other, second)])
        assert first.isnan().all()
        for work in works:
            work.wait()
        return first.item(), second.item()

    assert run(2, body) == [(1.0, 2.0)] * 2


@pytest.mark.parametrize(
    ("bodies", "message"),
    [
        pytest.param(
            (
                lambda g: g.all_reduce_(torch.ones(2), "sum").wait(),
                lambda g: g.all_reduce_(torch.ones(3), "sum").wait(),
            ),
            r"(?s)disagree in all_reduce.*rank 0: .*\[2\].*rank 1: .*\[3\]",
            id="shape",
        ),
        pytest.param(
            (
                lambda g: g.all_reduce_(torch.ones(2), "sum").wait(),
                lambda g: g.all_reduce_(torch.ones(2), "max").wait(),
            ),
            r"(?s)all_reduce\((sum|max)\).*all_reduce\((sum|max)\)",
            id="reduction",
        ),
        pytest.param(
            (lambda g: g.barrier(), lambda g: g.broadcast_(torch.ones(1), 0).wait()),
            r"(?s)rank 0: barrier.*rank 1: broadcast",
            id="operation",
        ),
        pytest.param(
            (
                lambda g: g.broadcast_(torch.ones(1), 0).wait(),
                lambda g: g.broadcast_(torch.ones(1, dtype=torch.bfloat16), 0).wait(),
            ),
            r"(?s)float32.*bfloat16",
            id="dtype",
        ),
        pytest.param(
            (lambda g: g.exchange([(1, torch.ones(2))], []), lambda g: g.exchange([], [(0, torch.ones(3))])[0].wait()),
            r"(?s)message from rank 0 to rank 1.*\[2\].*\[3\]",
            id="message shape",
        ),
        pytest.param(
            (lambda g: None, lambda g: g.exchange([], [(0, torch.ones(3))])[0].wait()),
            r"rank 1 waits in message from rank 0 to rank 1 .* for rank 0; rank 0 finished without taking part",
            id="never sent",
        ),
        pytest.param(
            (lambda g: g.barrier(), lambda g: None),
            r"rank 0 waits in barrier .* for rank 1; rank 1 finished without taking part",
            id="missing rank",
        ),
        pytest.param(
            (
                lambda g: g.exchange([], [(1, torch.ones(1))])[0].wait(),
                lambda g: g.exchange([], [(0, torch.ones(1))])[0].wait(),
            ),
            r"deadlock, every rank waits",
            id="deadlock",
        ),
        pytest.param(
            (
                lambda g: g.all_to_all_(torch.empty(2), torch.ones(2), [1, 1], [1, 1]).wait(),
                lambda g: g.all_to_all_(torch.empty(3), torch.ones(2), [2, 1], [1, 1]).wait(),
            ),
            r"all_to_all: rank 1 expects rows \[2, 1\], is sent \[1, 1\]",
            id="all_to_all rows",
        ),
    ],
)
def test_mismatches_are_reported_by_name(bodies, message):
    started = time.monotonic()
    with pytest.raises(CommunicationError, match=message):
        run(2, lambda group: bodies[group.rank](group))
    assert time.monotonic() - started < 5, "reported at once, not by timeout"


def test_a_slow_rank_is_named_after_the_timeout():
    def body(group):
        if group.rank == 2:
            time.sleep(1.0)
            return
        group.barrier()

    with pytest.raises(CommunicationError, match=r"waits in barrier .* for rank 2; not there after 0.2 s"):
        run(3, body, timeout_s=0.2)


def test_operations_left_open_are_listed():
    meeting = Meeting(2)
    ThreadTransport(meeting, "pp", (0, 1), 0).exchange([(1, torch.ones(1))], [])
    assert meeting.unfinished() == [
        "message from rank 0 to rank 1 of group pp(0, 1) #0: posted by rank 0, never by rank 1"
    ]


def test_sixty_four_ranks():
    def body(group):
        x = torch.ones(1)
        for _ in range(5):
            group.all_reduce_(x, "max").wait()
        group.all_reduce_(x, "sum").wait()
        return x.item()

    assert run(64, body) == [64.0] * 64
