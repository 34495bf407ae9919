"""The optimizer of a run: a rule applied to the master weights of every bucket, and the states that belong to it.

Sharded or whole is the bucket's business: the optimizer sees flat fp32 ranges. Whether a step is made may be a tensor;
a step that is not made leaves weights, states and the step count as they were, without the host knowing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.data_parallel.buckets import Buckets
from megatron.data_parallel.pieces import StatePiece
from megatron.optimizer.adam import Adam
from megatron.optimizer.fused_adam import imported_adam
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.param_groups import rates_of
from megatron.optimizer.rules import UpdateRule, UpdateSettings
from megatron.optimizer.sgd import Sgd


class Optimizer:
    """Update rule and states over `buckets`.

    Args:
        buckets: parameters, gradients and master weights.
        rule: what an update does to a flat range.
    """

    def __init__(self, buckets: Buckets, rule: UpdateRule):
        self.buckets = buckets
        self.rule = rule
        self.num_updates = torch.zeros((), dtype=torch.float32, device=buckets.ctx.device)
        """0-d fp32: updates made so far; skipped ones do not count (Adam's bias correction)."""
        self.states: list[dict[str, torch.Tensor]] = [
            {name: torch.zeros_like(bucket.master) for name in rule.state_names} for bucket in buckets
        ]

    @torch.no_grad()
    def step(self, ok: torch.Tensor | bool, rates: Rates, divisor: torch.Tensor | None = None) -> None:
        """Update all weights from reduced gradients and publish them to the parameters.

        Args:
            ok: whether to; a bool, or a 0/1 tensor (0-d) that the host need not know.
            rates: learning rates and weight decay of this step.
            divisor: 0-d fp32 that gradients are divided by (`Clip.divisor`); None: 1.
        """
        self.buckets.finish_publish()
        if ok is False:
            return
        skip = None
        if isinstance(ok, torch.Tensor):
            ok = ok.to(dtype=torch.float32, device=self.num_updates.device)
            skip = 1.0 - ok
        step = self.num_updates + 1.0
        for bucket, states in zip(self.buckets, self.states, strict=True):
            grads = bucket.kept_grads
            lr, weight_decay = rates_of(bucket.layout.key, rates)
            self.rule.update_(
                bucket.master,
                grads if grads.dtype == torch.float32 else grads.float(),
                [states[name] for name in self.rule.state_names],
                UpdateSettings(lr, weight_decay, step, divisor, skip),
            )
        self.num_updates += ok if skip is not None else 1.0
        self.buckets.publish()

    def publish(self) -> None:
        """Bring the master weights, after they were loaded, into the parameters of all ranks, and wait for it."""
        self.buckets.publish()
        self.buckets.finish_publish()

    def sync_master_from_params(self) -> None:
        """Take the parameters as the master weights: after loading a checkpoint without its optimizer."""
        self.buckets.sync_master_from_params()

    def state_pieces(self) -> Iterator[StatePiece]:
        """Master weights (of 16-bit parameters) and states in the ranges this rank keeps, as live views.

        Fp32 parameters are their own master: they are in `Buckets.parameter_pieces` only. After writing into the views
        call `publish`.
        """
        self.buckets.finish_publish()
        for bucket, states in zip(self.buckets, self.states, strict=True):
            if bucket.has_master:
                yield from bucket.pieces("master", bucket.master, bucket.kept)
            for name in self.rule.state_names:
                yield from bucket.pieces(name, states[name], bucket.kept)

    def state_dict(self) -> dict[str, Any]:
        """What is not a tensor per parameter."""
        return {"num_updates": int(self.num_updates.item())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.num_updates.fill_(float(state["num_updates"]))


def build_rule(config: OptimizerConfig) -> UpdateRule:
    """The update rule that --optimizer and --adam-backend name."""
    if config.optimizer == "sgd":
        return Sgd(momentum=config.sgd_momentum)
    if config.optimizer == "adam":
        settings = {"beta1": config.adam_beta1, "beta2": config.adam_beta2, "eps": config.adam_eps}
        return Adam(**settings) if config.adam_backend == "torch" else imported_adam(config.adam_backend, **settings)
    raise ValueError(f"--optimizer {config.optimizer} is not supported; use adam or sgd")


def build_optimizer(config: OptimizerConfig, buckets: Buckets) -> Optimizer:
    """The optimizer that the flags describe."""
    return Optimizer(buckets, build_rule(config))
