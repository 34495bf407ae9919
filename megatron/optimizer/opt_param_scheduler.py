"""The position in the learning-rate and weight-decay schedules, and who wins when checkpoint and flags differ.

A checkpoint holds the schedule it was written under. On resume it must equal the flags' schedule, or one of two flags
says which to follow; lengths that nobody typed (the decay lasts as long as the run) follow the run, so a longer run
needs no flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.lr_schedule import LrRange, LrSchedule, Rates, WeightDecaySchedule

# checkpoint key (Megatron's) -> (flag in messages, "lr" | "wd" schedule, field)
_FIELDS = {
    "max_lr": ("--lr", "lr", "max_lr"),
    "min_lr": ("--min-lr", "lr", "min_lr"),
    "init_lr": ("--lr-warmup-init", "lr", "init_lr"),
    "lr_warmup_steps": ("learning-rate warm-up in samples (--lr-warmup-*)", "lr", "warmup_steps"),
    "lr_decay_steps": ("learning-rate decay in samples (--lr-decay-iters, --lr-decay-samples)", "lr", "decay_steps"),
    "lr_decay_style": ("--lr-decay-style", "lr", "style"),
    "wsd_decay_steps": ("final decay in samples (--lr-wsd-decay-*)", "lr", "wsd_decay_steps"),
    "lr_wsd_decay_style": ("--lr-wsd-decay-style", "lr", "wsd_style"),
    "start_wd": ("--start-weight-decay", "wd", "start"),
    "end_wd": ("--end-weight-decay", "wd", "end"),
    "wd_incr_steps": ("weight-decay increase in samples", "wd", "incr_steps"),
    "wd_incr_style": ("--weight-decay-incr-style", "wd", "style"),
}
_RUN_LENGTHS = ("lr_decay_steps", "wd_incr_steps", "lr_warmup_steps")


class OptParamScheduler:
    """Rates at the current number of samples.

    Args:
        lr: schedule of the learning rate.
        weight_decay: schedule of the weight decay.
        lr_groups: bounds of the groups that have their own ("embedding" under --decoupled-lr).
        follows_run: keys among lr_decay_steps, wd_incr_steps and lr_warmup_steps whose value was not typed but derived
            from the length of the run; a checkpoint never holds a run to them.
        is_idle: no update will be made (--skip-train): takes whatever schedules a checkpoint holds.
    """

    def __init__(
        self,
        lr: LrSchedule,
        weight_decay: WeightDecaySchedule,
        *,
        lr_groups: Mapping[str, LrRange] | None = None,
        follows_run: frozenset[str] = frozenset({"wd_incr_steps"}),
        is_idle: bool = False,
    ):
        unknown = follows_run - set(_RUN_LENGTHS)
        assert not unknown, f"not lengths: {unknown}"
        self.lr, self.weight_decay = lr, weight_decay
        self.lr_groups = dict(lr_groups or {})
        self.follows_run = follows_run
        self.is_idle = is_idle
        self.num_steps = 0

    def step(self, samples: int) -> None:
        """Move on by `samples`, after an update that was made; a skipped update does not move the schedules."""
        self.num_steps += samples

    def rates(self) -> Rates:
        """What the next update uses."""
        lr = {"": self.lr.lr(self.num_steps)}
        lr.update({group: self.lr.lr(self.num_steps, bounds) for group, bounds in self.lr_groups.items()})
        return Rates(lr, self.weight_decay.weight_decay(self.num_steps))

    def state_dict(self) -> dict[str, Any]:
        """Position and schedules, under Megatron's keys."""
        schedules = {"lr": self.lr, "wd": self.weight_decay}
        state = {key: getattr(schedules[which], field) for key, (_, which, field) in _FIELDS.items()}
        return {
            "num_steps": self.num_steps,
            **state,
            "lr_groups": {name: tuple(r) for name, r in self.lr_groups.items()},
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, override: bool = False, use_checkpoint: bool = False
    ) -> list[str]:
        """Continue at the stored position; returns sentences about every difference, to be printed.

        Args:
            state: from `state_dict` or Megatron's own "opt_param_scheduler".
            override: --override-opt-param-scheduler, the flags' schedules apply.
            use_checkpoint: --use-checkpoint-opt-param-scheduler, the stored schedules apply.

        Raises ValueError when both are set, or neither and the schedules differ.
        """
        if override and use_checkpoint:
            raise ValueError(
                "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other; "
                "keep one of them"
            )
        use_checkpoint = use_checkpoint or self.is_idle
        differing = self._differences(state)
        followed = [] if use_checkpoint else [key for key in differing if key in self.follows_run]
        disputed = {key: difference for key, difference in differing.items() if key not in followed}
        if disputed and not (override or use_checkpoint):
            listed = "; ".join(
                f"{name} is {ours}, the checkpoint's is {theirs}" for name, ours, theirs in disputed.values()
            )
            raise ValueError(
                f"the schedule of the flags is not the one the checkpoint was trained under: {listed}. "
                "Give --override-opt-param-scheduler to follow the flags, --use-checkpoint-opt-param-scheduler to "
                "follow the checkpoint, or the checkpoint's values"
            )
        if use_checkpoint:
            self._adopt(state)
        self.num_steps = int(state["num_steps"])
        winner = "the checkpoint's" if use_checkpoint else "the flags'"
        return (
            []
            if self.is_idle
            else [
                f"{name}: flags {ours}, checkpoint {theirs}; {winner} applies"
                for name, ours, theirs in differing.values()
            ]
        )

    def _differences(self, state: Mapping[str, Any]) -> dict[str, tuple[str, Any, Any]]:
        """key -> (name, ours, the checkpoint's); what the checkpoint does not say cannot differ."""
        ours = self.state_dict()
        differing = {
            key: (name, ours[key], state[key])
            for key, (name, _, _) in _FIELDS.items()
            if state.get(key) is not None and ours[key] != state[key] and self._matters(key, state)
        }
        groups = {name: tuple(bounds) for name, bounds in state.get("lr_groups", ours["lr_groups"]).items()}
        if groups != ours["lr_groups"]:
            differing["lr_groups"] = ("--decoupled-lr, --decoupled-min-lr", ours["lr_groups"] or None, groups or None)
        return differing

    def _matters(self, key: str, state: Mapping[str, Any]) -> bool:
        """Whether a field has any effect under either of the two styles."""
        styles = {self.lr.style, state.get("lr_decay_style", self.lr.style)}
        if key in ("wsd_decay_steps", "lr_wsd_decay_style"):
            return "WSD" in styles
        if key in ("lr_decay_steps", "min_lr"):
            return styles != {"constant"}
        if key == "init_lr":
            return max(self.lr.warmup_steps, state.get("lr_warmup_steps") or 0) > 0
        if key == "wd_incr_steps":
            return {self.weight_decay.style, state.get("wd_incr_style", self.weight_decay.style)} != {"constant"}
        return True

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Take every stored field; fields it lacks stay."""
        changes: dict[str, dict[str, Any]] = {"lr": {}, "wd": {}}
        for key, (_, which, field) in _FIELDS.items():
            if state.get(key) is not None:
                changes[which][field] = state[key]
        self.lr, self.weight_decay = replace(self.lr, **changes["lr"]), replace(self.weight_decay, **changes["wd"])
        if "lr_groups" in state:
            self.lr_groups = {name: LrRange(*bounds) for name, bounds in state["lr_groups"].items()}


def build_scheduler(
    config: OptimizerConfig, *, global_batch_size: int, train_iters: int | None, train_samples: int | None
) -> OptParamScheduler:
    """The scheduler of a run of `train_iters` steps of `global_batch_size` samples, or of `train_samples` samples.

    Without a length (none, or 0) or a learning rate the run makes no updates and the scheduler is idle.
    """
    if config.lr is None or not (train_iters or train_samples):
        idle = WeightDecaySchedule(start=0.0, end=0.0, incr_steps=1)
        return OptParamScheduler(LrSchedule(max_lr=0.0, decay_steps=1, style="constant"), idle, is_idle=True)
    if train_samples is not None:
        unit, run, typed_decay = 1, train_samples, config.lr_decay_samples
        warmup, wsd_decay = config.lr_warmup_samples, config.lr_wsd_decay_samples
    else:
        unit, run, typed_decay = global_batch_size, train_iters, config.lr_decay_iters
        warmup, wsd_decay = config.lr_warmup_iters, config.lr_wsd_decay_iters
    decay_steps = (run if typed_decay is None else typed_decay) * unit
    fraction = config.lr_warmup_fraction
    lr = LrSchedule(
        max_lr=config.lr,
        min_lr=config.min_lr,
        init_lr=config.lr_warmup_init,
        warmup_steps=warmup * unit if fraction is None else fraction * decay_steps,
        decay_steps=decay_steps,
        style=config.lr_decay_style,
        wsd_decay_steps=None if wsd_decay is None else wsd_decay * unit,
        wsd_style=config.lr_wsd_decay_style,
    )
    weight_decay = WeightDecaySchedule(
        start=config.weight_decay if config.start_weight_decay is None else config.start_weight_decay,
        end=config.weight_decay if config.end_weight_decay is None else config.end_weight_decay,
        incr_steps=run * unit,
        style=config.weight_decay_incr_style,
    )
    follows_run = {"wd_incr_steps"}
    if typed_decay is None:
        follows_run |= {"lr_decay_steps"} if fraction is None else {"lr_decay_steps", "lr_warmup_steps"}
    return OptParamScheduler(lr, weight_decay, lr_groups=_decoupled(config), follows_run=frozenset(follows_run))


def _decoupled(config: OptimizerConfig) -> dict[str, LrRange]:
    """Bounds of the embedding and the output layer, where they have their own."""
    if config.decoupled_lr is None:
        return {}
    min_lr = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    return {"embedding": LrRange(config.decoupled_lr, min_lr)}
