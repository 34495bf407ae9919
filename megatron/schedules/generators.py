"""The order of forwards and backwards on every pipeline rank: GPipe, 1F1B, interleaved 1F1B, forward only.

Each works for any number of microbatches with any number of stages, one stage included, and each runs the backwards of
a chunk in microbatch order, so gradients are summed in the order of the one-rank run. A generator is a function
(num_stages, num_microbatches, num_chunks, group_size) -> compute-only Schedule, found by name; `register` adds one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from megatron.schedules.ops import BACKWARD, FORWARD, Op, Schedule, loop_placement
from megatron.schedules.passes import add_comm, check

Generator = Callable[[int, int, int, int], Schedule]
_GENERATORS: dict[str, Generator] = {}


def register(name: str) -> Callable[[Generator], Generator]:
    """Decorator: make a generator known as `name`. A name is given once."""

    def add(generator: Generator) -> Generator:
        if name in _GENERATORS:
            raise ValueError(f"a pipeline schedule named {name!r} is already registered")
        _GENERATORS[name] = generator
        return generator

    return add


def schedule_names() -> tuple[str, ...]:
    """Names `build_schedule` knows."""
    return tuple(_GENERATORS)


@lru_cache(maxsize=32)
def build_schedule(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None
) -> Schedule:
    """The checked schedule `name`, messages included.

    num_chunks: model chunks (virtual stages) per rank. group_size: microbatches that run on one chunk before the next
    chunk's turn (--microbatch-group-size-per-virtual-pipeline-stage); None means num_stages. Raises ValueError.
    """
    if name not in _GENERATORS:
        raise ValueError(f"there is no pipeline schedule {name!r}; use one of {', '.join(schedule_names())}")
    for word, number in (("stages", num_stages), ("microbatches", num_microbatches), ("chunks", num_chunks)):
        if number < 1:
            raise ValueError(f"a pipeline schedule needs at least 1 of {word}, not {number}")
    group_size = num_stages if group_size is None else group_size
    if num_chunks > 1 and group_size < num_stages:
        raise ValueError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group_size} is below --pipeline-model-parallel-size "
            f"{num_stages}: every turn of a chunk would wait for the last stage; use {num_stages} or more"
        )
    schedule = add_comm(_GENERATORS[name](num_stages, num_microbatches, num_chunks, group_size))
    check(schedule)
    return schedule


def _groups(num_microbatches: int, group_size: int) -> list[range]:
    """Consecutive groups of `group_size` microbatches or, where that does not divide, of a few more, as even as can be.

    A smaller last group would end a chunk's turn before the last stage has answered and cost up to v times the bubble,
    or deadlock; even groups of at least one microbatch per stage keep the bubble of the divisible case.
    """
    num_groups = max(1, num_microbatches // group_size)
    small, larger = divmod(num_microbatches, num_groups)
    starts = [index * small + min(index, larger) for index in range(num_groups + 1)]
    return [range(start, end) for start, end in zip(starts, starts[1:])]


def _order(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) of all forwards of a rank: group after group, in each chunk after chunk."""
    groups = _groups(num_microbatches, group_size)
    return [(microbatch, chunk) for group in groups for chunk in range(num_chunks) for microbatch in group]


def _backward_order(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """As `_order`, the chunks from the last to the first."""
    return [(m, num_chunks - 1 - chunk) for m, chunk in _order(num_microbatches, num_chunks, group_size)]


def _schedule(ranks: list[list[Op]], num_microbatches: int, num_chunks: int) -> Schedule:
    return Schedule(tuple(map(tuple, ranks)), num_chunks, num_microbatches, loop_placement(len(ranks), num_chunks))


@register("forward-only")
def forward_only(num_stages: int, num_microbatches: int, num_chunks: int, group_size: int) -> Schedule:
    """All forwards; for evaluation."""
    forwards = [Op(FORWARD, m, c) for m, c in _order(num_microbatches, num_chunks, group_size)]
    return _schedule([forwards] * num_stages, num_microbatches, num_chunks)


@register("gpipe")
def gpipe(num_stages: int, num_microbatches: int, num_chunks: int, group_size: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019); holds every microbatch's activations."""
    forwards = [Op(FORWARD, m, c) for m, c in _order(num_microbatches, num_chunks, group_size)]
    backwards = [Op(BACKWARD, m, c) for m, c in _backward_order(num_microbatches, num_chunks, group_size)]
    return _schedule([forwards + backwards] * num_stages, num_microbatches, num_chunks)


@register("1f1b")
def one_f_one_b(num_stages: int, num_microbatches: int, num_chunks: int, group_size: int) -> Schedule:
    """One forward, one backward (PipeDream-flush, Narayanan et al. 2021a); with several chunks, interleaved.

    Rank r holds at most num_stages - r microbatches' activations.
    """
    if num_chunks > 1:
        return interleaved(num_stages, num_microbatches, num_chunks, group_size)
    return _alternate(num_stages, num_microbatches, 1, num_microbatches, lambda rank: num_stages - 1 - rank)


@register("interleaved")
def interleaved(num_stages: int, num_microbatches: int, num_chunks: int, group_size: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021b, section 2.2): the bubble divided by num_chunks, for more messages."""
    largest = max(map(len, _groups(num_microbatches, group_size)))
    return _alternate(
        num_stages,
        num_microbatches,
        num_chunks,
        group_size,
        lambda rank: 2 * (num_stages - 1 - rank) + (num_chunks - 1) * largest,
    )


def _alternate(
    num_stages: int, num_microbatches: int, num_chunks: int, group_size: int, warmup: Callable[[int], int]
) -> Schedule:
    """`warmup(rank)` forwards, then forward and backward in turn, then the backwards that are left."""
    forwards = [Op(FORWARD, m, c) for m, c in _order(num_microbatches, num_chunks, group_size)]
    backwards = [Op(BACKWARD, m, c) for m, c in _backward_order(num_microbatches, num_chunks, group_size)]
    ranks = []
    for rank in range(num_stages):
        ahead = min(warmup(rank), len(forwards))
        pairs = zip(forwards[ahead:], backwards)
        ranks.append(forwards[:ahead] + [op for pair in pairs for op in pair] + backwards[len(forwards) - ahead :])
    return _schedule(ranks, num_microbatches, num_chunks)
