#!/usr/bin/env python3
"""Draw the loss curve of a run from its metrics.jsonl: training loss, validation loss, and lines to compare with.

Where a run was resumed from an earlier checkpoint, the iterations it did again replace those it had lost.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import NamedTuple


class Curves(NamedTuple):
    """Iteration -> loss."""

    train: dict[int, float]
    valid: dict[int, float]
    seconds: dict[int, float]
    """Iteration -> seconds a step, averaged since the log line before."""


def read_curves(path: Path) -> Curves:
    """Curves of a metrics file; ValueError for a line that is not JSON, or a file without a training record."""
    curves = Curves({}, {}, {})
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            raise ValueError(f"{path}:{number} is not JSON: {line[:60]!r}") from None
        iteration = record.get("iteration")
        if record.get("event") == "train":
            for curve in curves:
                for later in [other for other in curve if other > iteration]:
                    del curve[later]
            if record["loss"] is not None:
                curves.train[iteration] = record["loss"]
            curves.seconds[iteration] = record["seconds_per_step"]
        elif record.get("event") == "eval" and record["split"] == "valid" and record["loss"] is not None:
            curves.valid[iteration] = record["loss"]
    if not curves.train:
        raise ValueError(f"{path} has no training record yet")
    return curves


def draw(curves: Curves, output: Path, title: str, baselines: list[tuple[str, float]]) -> None:
    """Write the picture to `output` (the suffix chooses the format)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(list(curves.train), list(curves.train.values()), color="tab:blue", linewidth=1.2, label="training loss")
    if curves.valid:
        axes.plot(
            list(curves.valid),
            list(curves.valid.values()),
            "o-",
            color="tab:red",
            markersize=4,
            label="validation loss",
        )
    for name, value in baselines:
        axes.axhline(value, color="tab:gray", linestyle="--", linewidth=1)
        axes.annotate(f"{name} {value:.2f}", (0.99, value), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set(xlabel="iteration", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
    pyplot.close(figure)


def parse_baseline(text: str) -> tuple[str, float]:
    """'unigram=6.31' -> ("unigram", 6.31)."""
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=LOSS") from None


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics", type=Path, required=True, help="metrics.jsonl of the run")
    parser.add_argument("--output", type=Path, required=True, help="picture to write, .png or .svg")
    parser.add_argument("--title", default="loss", help="text above the picture")
    parser.add_argument(
        "--baseline",
        type=parse_baseline,
        action="append",
        default=[],
        metavar="NAME=LOSS",
        help="draw a line at LOSS; may be given several times",
    )
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        print("error: drawing needs matplotlib, which is not installed; pip install matplotlib", file=sys.stderr)
        return 1
    try:
        curves = read_curves(args.metrics)
        draw(curves, args.output, args.title, args.baseline)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {len(curves.train)} training points, {len(curves.valid)} evaluations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
