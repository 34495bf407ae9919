"""When a run stops by itself: after a time, at a step, on a signal, on numbers that went wrong."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag, parse_signal
from megatron.config.rules import at_least, changed, raise_if, shown


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    exit_interval: int | None = flag(None)
    """Save and exit at the first step that is a multiple of this. None: never."""
    exit_duration_in_mins: int | None = flag(None)
    """Save and exit once this many minutes have passed. None: never."""
    exit_signal_handler: bool = flag(False)
    """Treat --exit-signal as SIGTERM and SIGINT are always treated: finish the step, save once, exit."""
    exit_signal: str = flag("SIGTERM", parse=parse_signal, metavar="SIGNAL")
    """Signal of --exit-signal-handler, by name or number."""
    check_for_nan_in_loss_and_grad: bool = flag(True, names=("--no-check-for-nan-in-loss-and-grad",))
    """Do not stop when loss or gradients are not finite."""
    max_consecutive_skipped_iterations: int = flag(100, own=True)
    """Stop when this many steps in a row were skipped because of overflow at the smallest loss scale. 0: never."""

    def __post_init__(self) -> None:
        raise_if(self.problems())

    def problems(self) -> list[str]:
        """What is wrong with this concern by itself, a line each."""
        lines = at_least(self, 1, "exit_interval", "exit_duration_in_mins")
        lines += at_least(self, 0, "max_consecutive_skipped_iterations")
        if changed(self, "exit_signal") and not self.exit_signal_handler:
            lines.append(
                f"{shown(self, 'exit_signal')} would be ignored without --exit-signal-handler; add that flag or drop it"
            )
        if self.exit_signal in ("SIGKILL", "SIGSTOP"):
            lines.append(f"{shown(self, 'exit_signal')}: no process can catch it; use SIGTERM, SIGUSR1 or SIGUSR2")
        return lines
