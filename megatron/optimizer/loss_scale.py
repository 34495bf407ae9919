"""Loss scale for fp16: what the loss is multiplied by so that small gradients do not vanish, and how it adapts.

All state is 0-d tensors on the device and every decision is arithmetic on a 0/1 tensor, so nothing waits for the host.
The rules are Megatron's: an overflow uses up one of `hysteresis` chances and when none is left each further overflow
halves the scale, down to a minimum; `window` good steps in a row double it and restore the chances.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from megatron.config.precision import PrecisionConfig

_LARGEST = 2.0**127  # beyond it fp32 is inf, which halving cannot leave


class LossScaleExhausted(RuntimeError):
    """Every step overflows and the scale cannot become smaller."""


class LossScale(Protocol):
    """A loss scale."""

    scale: torch.Tensor
    """0-d fp32."""

    def update(self, ok: torch.Tensor | bool) -> None:
        """Take note of a step that was made (1) or skipped for overflow (0); the same value on all ranks."""

    def check_progress(self) -> None:
        """Raise LossScaleExhausted when skipping does not end. Reads one number from the device."""

    def state_dict(self) -> dict[str, Any]:
        """State as plain numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""


class ConstantLossScale:
    """The same scale at every step; 1 where no scale is needed.

    Args:
        scale: a power of two, so that removing it is exact.
        device: of the run.
        max_stuck_steps: stop after that many skipped steps in a row; 0: never.
    """

    def __init__(self, scale: float, device: torch.device, *, max_stuck_steps: int = 0):
        self.scale = torch.tensor(float(scale), dtype=torch.float32, device=device)
        self.max_stuck_steps = max_stuck_steps
        self.stuck_steps = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, ok: torch.Tensor | bool) -> None:
        """See `LossScale.update`."""
        ok = torch.as_tensor(ok, device=self.scale.device).bool()
        self.stuck_steps = torch.where(ok, 0, self.stuck_steps + 1)

    def check_progress(self) -> None:
        """See `LossScale.check_progress`."""
        stuck = int(self.stuck_steps.item())
        if 0 < self.max_stuck_steps <= stuck:
            raise LossScaleExhausted(
                f"{stuck} steps in a row were skipped because gradients were not finite at the fixed loss scale "
                f"{self.scale.item():g}; leave out --loss-scale for a dynamic one, lower it or --lr, use --bf16, or "
                "raise --max-consecutive-skipped-iterations"
            )

    def state_dict(self) -> dict[str, Any]:
        """See `LossScale.state_dict`."""
        return {"scale": self.scale.item(), "stuck_steps": int(self.stuck_steps.item())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LossScale.load_state_dict`; the scale itself is the flag's."""
        self.stuck_steps.fill_(state.get("stuck_steps", 0))


class DynamicLossScale:
    """A scale that halves on overflow and doubles after a run of good steps.

    Args:
        initial: first scale.
        minimum: smallest scale.
        window: good steps in a row after which it doubles.
        hysteresis: overflows since the last doubling before it halves.
        device: of the run.
        max_stuck_steps: stop after that many steps in a row skipped at the smallest scale; 0: never.
    """

    def __init__(
        self,
        *,
        initial: float,
        minimum: float,
        window: int,
        hysteresis: int,
        device: torch.device,
        max_stuck_steps: int = 0,
    ):
        if not 0 < minimum <= initial:
            raise ValueError(
                f"--min-loss-scale {minimum:g} and --initial-loss-scale {initial:g}: needs 0 < min <= initial; "
                "change one of them"
            )
        if window < 1 or hysteresis < 1:
            raise ValueError(
                f"--loss-scale-window {window} and --hysteresis {hysteresis} must be at least 1; raise them"
            )
        self.minimum, self.window, self.hysteresis = float(minimum), int(window), int(hysteresis)
        self.max_stuck_steps = max_stuck_steps
        self.scale = torch.tensor(float(initial), dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.chances = torch.full((), self.hysteresis, dtype=torch.int64, device=device)
        self.stuck_steps = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, ok: torch.Tensor | bool) -> None:
        """See `LossScale.update`."""
        ok = torch.as_tensor(ok, device=self.scale.device).bool()
        self.stuck_steps = torch.where(ok | (self.scale > self.minimum), 0, self.stuck_steps + 1)
        chances = torch.where(ok, self.chances, self.chances - 1)
        good_steps = torch.where(ok, self.good_steps + 1, 0)
        is_grown = good_steps == self.window
        is_shrunk = ~ok & (chances <= 0)
        shrunk, grown = (self.scale * 0.5).clamp(min=self.minimum), (self.scale * 2.0).clamp(max=_LARGEST)
        self.scale = torch.where(is_shrunk, shrunk, torch.where(is_grown, grown, self.scale))
        self.good_steps = torch.where(is_grown, 0, good_steps)
        self.chances = torch.where(is_grown, self.hysteresis, chances)

    def check_progress(self) -> None:
        """See `LossScale.check_progress`."""
        stuck = int(self.stuck_steps.item())
        if 0 < self.max_stuck_steps <= stuck:
            raise LossScaleExhausted(
                f"{stuck} steps in a row were skipped because gradients were not finite even at the smallest loss "
                f"scale {self.scale.item():g}; the model diverges: lower --lr or --min-loss-scale, use --bf16, or "
                "raise --max-consecutive-skipped-iterations"
            )

    def state_dict(self) -> dict[str, Any]:
        """See `LossScale.state_dict`; the first three under Megatron's names."""
        return {
            "scale": self.scale.item(),
            "growth_tracker": int(self.good_steps.item()),
            "hysteresis_tracker": int(self.chances.item()),
            "stuck_steps": int(self.stuck_steps.item()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LossScale.load_state_dict`; the state of a run without a dynamic scale changes nothing."""
        if "growth_tracker" not in state:
            return
        self.scale.fill_(float(state["scale"]))
        self.good_steps.fill_(int(state["growth_tracker"]))
        self.chances.fill_(int(state["hysteresis_tracker"]))
        self.stuck_steps.fill_(int(state.get("stuck_steps", 0)))


def build_loss_scale(config: PrecisionConfig, device: torch.device, *, max_stuck_steps: int = 0) -> LossScale:
    """The loss scale of a run: 1 unless --fp16; fixed with --loss-scale, else dynamic."""
    if not config.fp16:
        return ConstantLossScale(1.0, device, max_stuck_steps=max_stuck_steps)
    if config.loss_scale is not None:
        return ConstantLossScale(config.loss_scale, device, max_stuck_steps=max_stuck_steps)
    return DynamicLossScale(
        initial=config.initial_loss_scale,
        minimum=config.min_loss_scale,
        window=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
        device=device,
        max_stuck_steps=max_stuck_steps,
    )
