"""Which transformer layers, and which end of the model, each pipeline stage and chunk holds.

A *virtual stage* is a run of consecutive layers; the model is the virtual stages in order. Virtual stage k sits on
pipeline rank k % num_stages as its chunk k // num_stages. The layers of all virtual stages always add up to
`num_layers`: a split that does not fit is refused, never rounded, because a rounded one trains a smaller model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_PP = "--pipeline-model-parallel-size"
_PER_VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
_NUM_VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
_FIRST = "--decoder-first-pipeline-num-layers"
_LAST = "--decoder-last-pipeline-num-layers"
_LAYOUT = "--pipeline-model-parallel-layout"
_ACCOUNT_EMBEDDING = "--account-for-embedding-in-pipeline-split"
_ACCOUNT_LOSS = "--account-for-loss-in-pipeline-split"


class Chunk(NamedTuple):
    """Layers first_layer .. last_layer_exclusive - 1 (global numbers from 0), and the ends of the model it holds."""

    first_layer: int
    last_layer_exclusive: int
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> int:
        return self.last_layer_exclusive - self.first_layer

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.last_layer_exclusive)


@dataclass(frozen=True)
class PipelineLayout:
    """`chunks[stage][chunk]` for every pipeline rank and every model chunk on it."""

    num_stages: int
    num_chunks: int
    chunks: tuple[tuple[Chunk, ...], ...]

    @property
    def num_layers(self) -> int:
        return sum(chunk.num_layers for stage in self.chunks for chunk in stage)

    @property
    def virtual_stages(self) -> tuple[Chunk, ...]:
        """All chunks in model order."""
        return tuple(self.chunks[k % self.num_stages][k // self.num_stages] for k in range(self.num_virtual_stages))

    @property
    def num_virtual_stages(self) -> int:
        return self.num_stages * self.num_chunks

    @property
    def location_of_layer(self) -> tuple[tuple[int, int], ...]:
        """(stage, chunk) of every global layer number."""
        return tuple(
            (k % self.num_stages, k // self.num_stages)
            for k, chunk in enumerate(self.virtual_stages)
            for _ in chunk.layers
        )

    @property
    def stage_of_layer(self) -> tuple[int, ...]:
        """Pipeline rank of every global layer number."""
        return tuple(stage for stage, _ in self.location_of_layer)

    @property
    def chunk_of_layer(self) -> tuple[int, ...]:
        """Chunk (on its pipeline rank) of every global layer number."""
        return tuple(chunk for _, chunk in self.location_of_layer)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        return tuple(sum(chunk.num_layers for chunk in stage) for stage in self.chunks)

    def __str__(self) -> str:
        """One line a stage, for the start-up print: `stage 0: E layers 0-1 | layers 4-5`."""
        return "\n".join(
            f"stage {index}: " + " | ".join(_describe(chunk) for chunk in stage)
            for index, stage in enumerate(self.chunks)
        )


def pipeline_layout(
    num_layers: int,
    pipeline_model_parallel_size: int,
    num_layers_per_virtual_pipeline_stage: int | None = None,
    num_virtual_stages_per_pipeline_rank: int | None = None,
    decoder_first_pipeline_num_layers: int | None = None,
    decoder_last_pipeline_num_layers: int | None = None,
    account_for_embedding_in_pipeline_split: bool = False,
    account_for_loss_in_pipeline_split: bool = False,
    pipeline_model_parallel_layout: str | None = None,
) -> PipelineLayout:
    """Split the model as Megatron's flags of the same names say.

    Raises ValueError naming the flags, their values, the rule and a legal alternative.
    """
    stages = pipeline_model_parallel_size
    _require_positive("--num-layers", num_layers)
    _require_positive(_PP, stages)
    given = {
        _PER_VIRTUAL: num_layers_per_virtual_pipeline_stage,
        _NUM_VIRTUAL: num_virtual_stages_per_pipeline_rank,
        _FIRST: decoder_first_pipeline_num_layers,
        _LAST: decoder_last_pipeline_num_layers,
        _ACCOUNT_EMBEDDING: account_for_embedding_in_pipeline_split or None,
        _ACCOUNT_LOSS: account_for_loss_in_pipeline_split or None,
        _LAYOUT: pipeline_model_parallel_layout,
    }
    given = {flag: value for flag, value in given.items() if value is not None}
    _refuse_conflicts(given)
    if pipeline_model_parallel_layout is not None:
        return _from_string(num_layers, stages, pipeline_model_parallel_layout)
    for flag in (_PER_VIRTUAL, _NUM_VIRTUAL, _FIRST, _LAST):
        if flag in given:
            _require_positive(flag, given[flag])
    if _FIRST in given or _LAST in given:
        per_stage = _uneven(num_layers, stages, given.get(_FIRST), given.get(_LAST))
    else:
        extra = (_ACCOUNT_EMBEDDING in given) + (_ACCOUNT_LOSS in given)
        per_stage = [_even(num_layers, stages, extra)] * stages
    num_chunks = _num_chunks(num_layers, stages, per_stage, given)
    counts = [per_stage[k % stages] // num_chunks for k in range(stages * num_chunks)]
    if _ACCOUNT_EMBEDDING in given:
        counts[0] -= 1
    if _ACCOUNT_LOSS in given:
        counts[-1] -= 1
    if min(counts) < 0:
        raise ValueError(
            f"{_ACCOUNT_EMBEDDING} and {_ACCOUNT_LOSS} count the embedding and the loss as a layer each, and with "
            f"--num-layers {num_layers} on {_PP} {stages} a virtual stage would hold fewer than none; "
            f"drop one of the two flags or use a smaller {_PP}"
        )
    return _from_counts(stages, num_chunks, counts)


def _from_counts(stages: int, num_chunks: int, counts: list[int]) -> PipelineLayout:
    """`counts[k]` layers on virtual stage k; the embedding opens the first, the head closes the last."""
    chunks: list[list[Chunk]] = [[] for _ in range(stages)]
    first = 0
    for k, count in enumerate(counts):
        chunks[k % stages].append(Chunk(first, first + count, k == 0, k == len(counts) - 1))
        first += count
    return PipelineLayout(stages, num_chunks, tuple(tuple(stage) for stage in chunks))


def _require_positive(flag: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{flag} {value} must be at least 1")


def _refuse_conflicts(given: dict[str, object]) -> None:
    """Flags that say the same thing twice: which one would win must not be a guess."""
    exclusive = [flag for flag in (_LAYOUT, _PER_VIRTUAL, _NUM_VIRTUAL) if flag in given]
    if len(exclusive) > 1:
        raise ValueError(f"{_both(exclusive, given)} each set the number of virtual stages; give only one of them")
    if _LAYOUT in given and len(given) > 1:
        raise ValueError(f"{_both(list(given), given)}: {_LAYOUT} already states every stage; drop the others")
    uneven = [flag for flag in (_FIRST, _LAST) if flag in given]
    account = [flag for flag in (_ACCOUNT_EMBEDDING, _ACCOUNT_LOSS) if flag in given]
    if uneven and account:
        raise ValueError(f"{_both(uneven + account, given)} are two ways to lighten the ends; give one of them")
    if uneven and _PER_VIRTUAL in given:
        raise ValueError(
            f"{_both([*uneven, _PER_VIRTUAL], given)}: with uneven stages give {_NUM_VIRTUAL} instead of {_PER_VIRTUAL}"
        )


def _both(flags: list[str], given: dict[str, object]) -> str:
    return " and ".join(flag if given[flag] is True else f"{flag} {given[flag]}" for flag in flags)


def _even(num_layers: int, stages: int, extra: int) -> int:
    """Layers (embedding and loss counted where asked) per pipeline rank."""
    total = num_layers + extra
    if total % stages == 0:
        return total // stages
    counted = f" plus {extra} for the embedding/loss" if extra else ""
    sizes = [size for size in _divisors(total)]
    last = _lighter_last(num_layers, stages)
    raise ValueError(
        f"--num-layers {num_layers}{counted} does not divide by {_PP} {stages}: the remaining {total % stages} would "
        f"be lost; use --num-layers {_nearest_multiples(total, stages, extra)}, {_PP} {_one_of(sizes)}, or uneven "
        f"stages ({_FIRST}/{_LAST}{f', such as {_LAST} {last}' if last else ''}, or {_LAYOUT})"
    )


def _uneven(num_layers: int, stages: int, first: int | None, last: int | None) -> list[int]:
    """Layers per pipeline rank when the first and/or last rank's are given."""
    text = " and ".join(f"{flag} {value}" for flag, value in ((_FIRST, first), (_LAST, last)) if value is not None)
    if stages == 1:
        raise ValueError(f"{text} needs {_PP} 2 or more, and it is 1; drop it")
    middle_stages = stages - (first is not None) - (last is not None)
    middle = num_layers - (first or 0) - (last or 0)
    each, rest = divmod(middle, middle_stages) if middle_stages else (0, middle)
    if middle_stages and (each < 1 or rest) or not middle_stages and rest:
        raise ValueError(
            f"{text} leave {middle} of --num-layers {num_layers} for the other {middle_stages} of "
            f"{_PP} {stages}, which must divide evenly with at least one layer each; "
            f"use {_uneven_alternative(num_layers, stages, first, last)}"
        )
    counts = [each] * stages
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def _uneven_alternative(num_layers: int, stages: int, first: int | None, last: int | None) -> str:
    """Concrete flags near the ones given that fit, or the layout string where none does."""
    if first is not None and last is not None and stages == 2:
        candidates = [(first, num_layers - first), (num_layers - last, last)]
    else:
        near = range(1, num_layers)
        candidates = [(f, last) for f in near] if first is not None else [(None, n) for n in near]
        if first is not None and last is not None:
            candidates += [(first, n) for n in near]
    middle_stages = stages - (first is not None) - (last is not None)

    def fits(pair: tuple[int | None, int | None]) -> bool:
        middle = num_layers - (pair[0] or 0) - (pair[1] or 0)
        ends = all(value is None or value >= 1 for value in pair)
        return ends and (middle == 0 if not middle_stages else middle >= middle_stages and middle % middle_stages == 0)

    def distance(pair: tuple[int | None, int | None]) -> int:
        return abs((pair[0] or 0) - (first or 0)) + abs((pair[1] or 0) - (last or 0))

    legal = sorted(filter(fits, candidates), key=distance)
    if not legal:
        return f"a smaller {_PP}, or {_LAYOUT}"
    return " ".join(f"{flag} {value}" for flag, value in zip((_FIRST, _LAST), legal[0]) if value is not None)


def _num_chunks(num_layers: int, stages: int, per_stage: list[int], given: dict[str, object]) -> int:
    """Model chunks per pipeline rank; refuses a number that would not fit every rank exactly."""
    if _PER_VIRTUAL in given:
        per_virtual = int(given[_PER_VIRTUAL])  # type: ignore[call-overload]
        if per_stage[0] % per_virtual:
            legal = _divisors(per_stage[0])
            raise ValueError(
                f"{_PER_VIRTUAL} {per_virtual} does not divide the {per_stage[0]} layers that --num-layers "
                f"{num_layers} puts on each of {_PP} {stages} stages: layers would be lost; "
                f"use {_PER_VIRTUAL} {_one_of(legal)}, or --num-layers "
                f"{_nearest_multiples(num_layers, stages * per_virtual, 0)}"
            )
        num_chunks, flag = per_stage[0] // per_virtual, f"{_PER_VIRTUAL} {per_virtual}"
    elif _NUM_VIRTUAL in given:
        num_chunks = int(given[_NUM_VIRTUAL])  # type: ignore[call-overload]
        flag = f"{_NUM_VIRTUAL} {num_chunks}"
        for stage, count in enumerate(per_stage):
            if count % num_chunks:
                raise ValueError(
                    f"{flag} does not divide the {count} layers of pipeline stage {stage} (--num-layers {num_layers}, "
                    f"{_PP} {stages}); use {_NUM_VIRTUAL} {_one_of(_divisors(count))}, or {_LAYOUT}"
                )
    else:
        return 1
    if stages == 1 and num_chunks > 1:
        raise ValueError(
            f"{flag} with --num-layers {num_layers} makes {num_chunks} virtual stages on {_PP} 1, where there is no "
            f"pipeline to interleave; drop it or use {_PP} 2 or more"
        )
    return num_chunks


# ---- the layout string: E embedding, t layer, L loss, | between stages, (..)*n and t*n repetition, commas ignored


def _from_string(num_layers: int, stages: int, text: str) -> PipelineLayout:
    """Virtual stages of e.g. `Ett|(tt|)*6ttL`; stage k of the string is virtual stage k; an empty one is legal."""
    parts = _unroll(text).split("|")
    if len(parts) % stages:
        raise ValueError(
            f"{_LAYOUT} {text!r} has {len(parts)} stages, which is not a multiple of {_PP} {stages}; write "
            f"{_nearest_multiples(len(parts), stages, 0)} stages or use {_PP} {_one_of(_divisors(len(parts)))}"
        )
    flat = "".join(parts)
    if not parts[0].startswith("E") or flat.count("E") != 1:
        raise ValueError(f"{_LAYOUT} {text!r} must have exactly one E (embedding), opening its first stage")
    if not parts[-1].endswith("L") or flat.count("L") != 1:
        raise ValueError(f"{_LAYOUT} {text!r} must have exactly one L (loss), closing its last stage")
    counts = [part.count("t") for part in parts]
    if sum(counts) != num_layers:
        raise ValueError(
            f"{_LAYOUT} {text!r} has {sum(counts)} t (layers) but --num-layers is {num_layers}; "
            f"use --num-layers {sum(counts)} or write {num_layers} t"
        )
    return _from_counts(stages, len(parts) // stages, counts)


def _unroll(text: str) -> str:
    """Expand repetitions, innermost first; refuses any character the layout does not know."""
    source = "".join(character for character in text if character != "," and not character.isspace())
    expanded, position = _unroll_group(text, source, 0)
    if position != len(source):
        raise ValueError(f"{_LAYOUT} {text!r} has a ')' without its '('")
    return expanded


def _unroll_group(text: str, source: str, position: int) -> tuple[str, int]:
    """Expand from `position` up to the closing ')' or the end; returns the expansion and where it stopped."""
    expanded = ""
    while position < len(source) and source[position] != ")":
        character = source[position]
        position += 1
        if character == "(":
            item, position = _unroll_group(text, source, position)
            if position == len(source):
                raise ValueError(f"{_LAYOUT} {text!r} has a '(' without its ')'")
            position += 1
        elif character in "Et|L":
            item = character
        elif character == "m":
            raise ValueError(
                f"{_LAYOUT} {text!r} places an m (multi-token prediction layer), which is not yet supported; remove it"
            )
        else:
            raise ValueError(
                f"{_LAYOUT} {text!r} has {character!r}; known are E (embedding), t (layer), L (loss), | (next stage), "
                f"(..)*n and t*n (repetition)"
            )
        if position < len(source) and source[position] == "*":
            end = position + 1
            while end < len(source) and source[end].isdigit():
                end += 1
            if end == position + 1:
                raise ValueError(f"{_LAYOUT} {text!r} has a '*' without a number after it; write for example t*3")
            item, position = item * int(source[position + 1 : end]), end
        expanded += item
    return expanded, position


# ---- words for messages


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _one_of(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _nearest_multiples(number: int, step: int, extra: int) -> str:
    """The multiples of `step` next to `number`, less the `extra` that are not layers."""
    low = number // step * step
    return _one_of([value - extra for value in (low, low + step) if value - extra > 0])


def _lighter_last(num_layers: int, stages: int) -> int | None:
    """The size of a last stage, as near an even split as possible, that lets the others divide evenly."""
    if stages == 1:
        return None
    legal = [n for n in range(1, num_layers) if (num_layers - n) % (stages - 1) == 0 and num_layers - n >= stages - 1]
    return min(legal, key=lambda n: (abs(n * stages - num_layers), n), default=None)


def _describe(chunk: Chunk) -> str:
    if chunk.num_layers == 0:
        layers = "no layers"
    elif chunk.num_layers == 1:
        layers = f"layer {chunk.first_layer}"
    else:
        layers = f"layers {chunk.first_layer}-{chunk.last_layer_exclusive - 1}"
    return ("embedding, " if chunk.has_embedding else "") + layers + (", head" if chunk.has_head else "")
