"""The loop around the step: batch sizes, log lines, evaluations, checkpoints, and when to stop.

Order within an iteration: data, step, (every log interval) log line, (every eval interval) evaluation, (every save
interval) checkpoint, then the reasons to stop. All ranks stop after the same iteration: their wishes are summed in the
step's own reduction, and every rank acts on the sum. On a GPU the sum is read while the next step runs, so a signal
stops the run one step later there and no step waits for the host.

A skipped step (fp16 overflow) counts as an iteration and consumes its samples, as in Megatron; the learning-rate and
weight-decay schedules and Adam's step count do not move.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron.distributed.collectives import all_gather_object
from megatron.distributed.device import HostCopy, memory_bytes, read_lag
from megatron.training.evaluate import Evaluation, evaluate
from megatron.training.flops import model_flops
from megatron.training.metrics import HostFacts, StepRecord, summarize
from megatron.training.setup import Run
from megatron.training.signals import StopRequest
from megatron.training.state import save_if_new
from megatron.training.step import StepResult, Wishes, to_device, train_step


class TrainingError(RuntimeError):
    """The run cannot go on: a number that is not finite, or overflow without end. Raised on every rank alike."""


class Outcome(NamedTuple):
    """How a run ended: `reason` is one of complete, exit-interval, exit-duration, signal, skip-train."""

    reason: str
    iteration: int
    evaluations: tuple[Evaluation, ...]


class Loop:
    """Trains `run` from its position to the end or to a reason to stop; `on_record` is called with every step."""

    def __init__(
        self,
        run: Run,
        stop: StopRequest,
        on_record: Callable[[StepRecord], None] | None = None,
    ):
        self.run, self.stop, self.on_record = run, stop, on_record
        self._pending: deque[tuple[int, HostCopy, StepResult]] = deque()
        self._lag = read_lag(run.ctx.device)
        self._reason: str | None = None
        self._interval_flops = 0.0
        self._interval_start = self._busy_seconds()
        config = run.config
        # A dynamic loss scale finds its value by overflowing: there a step that is not finite is skipped.
        self._stops_at_nan = config.resilience.check_for_nan_in_loss_and_grad and not (
            config.precision.fp16 and config.precision.loss_scale is None
        )
        self.evaluations: list[Evaluation] = []

    def train(self) -> Outcome:
        """Run to the end, evaluations and checkpoints included."""
        run, reason = self.run, None
        if not run.config.training.skip_train:
            reason = self._iterate()
            self._flush()
            save_if_new(run)
        reason = reason or self._evaluate_finally()
        return Outcome(reason, run.position.iteration, tuple(self.evaluations))

    def _evaluate_finally(self) -> str:
        """The evaluations of a run that was not broken off."""
        for split in ("valid", "test"):
            if self.run.loaders[split] is not None and not self._evaluate(split, is_final=True):
                return "signal"
        return "skip-train" if self.run.config.training.skip_train else "complete"

    def _iterate(self) -> str | None:
        """Steps until all iterations are done (None) or a reason to stop."""
        run, config = self.run, self.run.config
        if run.any_rank(self.stop.is_set):
            return "signal"
        while run.position.iteration < config.train_iterations:
            run.profiler.before_step(run.position.iteration)
            self._step()
            iteration = run.position.iteration
            run.profiler.after_step(iteration)
            if iteration % config.logging.log_interval == 0:
                self._flush()
            if self._is_due(config.logging.log_memory_interval):
                self._log_memory()
            wants_evaluation = (
                self._is_due(config.training.eval_interval)
                and iteration >= (config.training.start_eval_at_iter or 0)
                and run.loaders["valid"] is not None
            )
            if self._reason is None and wants_evaluation and not self._evaluate("valid", is_final=False):
                self._reason = "signal"
            if self._is_due(config.checkpoint.save_interval):
                self._read_votes(0)
                save_if_new(run)
            if self._reason is not None:
                return self._reason
            if self._is_due(config.resilience.exit_interval):
                return "exit-interval"
        return None

    def _step(self) -> None:
        run, position = self.run, self.run.position
        batch_size = run.config.batch_size_at(position.consumed_samples)
        with run.ledger.phase("step", step=position.iteration + 1):
            with run.ledger.phase("data"), run.timers.span("batch-generator", 1):
                batches = [to_device(batch, run.ctx.device) for batch in run.loaders["train"].next_step(batch_size)]
            result = train_step(run, batches, Wishes(self.stop.is_set, self._is_deadline_past()))
            is_committed = self._settle(result.ok)
        if is_committed:
            run.scheduler.step(batch_size)
        position.num_skipped += not is_committed
        position.advance(batch_size)
        learning_rate = run.scheduler.rates().lr_of("")
        facts = HostFacts(position.iteration, position.consumed_samples, batch_size, learning_rate)
        run.rows.add(facts, result.row)
        self._interval_flops += model_flops(run.config, batch_size, run.padded_vocab)
        self._pending.append((position.iteration, HostCopy(result.votes), result))
        self._read_votes(self._lag)
        run.reporter.step(position.iteration)

    def _is_due(self, interval: int | None) -> bool:
        return bool(interval) and self.run.position.iteration % interval == 0

    def _is_deadline_past(self) -> bool:
        minutes = self.run.config.resilience.exit_duration_in_mins
        return minutes is not None and sum(self.run.ledger.totals().values()) > 60 * minutes

    def _read_votes(self, lag: int) -> None:
        """Act on the votes of all steps but the newest `lag`."""
        while len(self._pending) > lag:
            iteration, copy, result = self._pending.popleft()
            signal, deadline, bad_losses, bad_steps = copy.read().tolist()
            if bad_steps and self._stops_at_nan:
                self._fail_on_nan(iteration, int(bad_losses), result)
            if self._reason is None and (signal or deadline):
                self._reason = "signal" if signal else "exit-duration"

    def _fail_on_nan(self, iteration: int, num_bad_losses: int, result: StepResult) -> None:
        if bool(result.is_local_loss_bad):
            sys.stderr.write(f"rank {self.run.ctx.rank}, iteration {iteration}: the loss is not finite here\n")
        where = (
            f"the loss of {num_bad_losses} rank(s)" if num_bad_losses else "the gradient norm (every loss is finite)"
        )
        raise TrainingError(
            f"iteration {iteration}: {where} is not finite. The update was not made and nothing was saved. Resume from "
            "the last checkpoint with a lower --lr or other data, or pass --no-check-for-nan-in-loss-and-grad to skip "
            "such steps"
        )

    def _settle(self, ok: torch.Tensor) -> bool:
        """Whether the update was made. Where a step that is not made stops the run anyway, the device is not asked."""
        if self._stops_at_nan:
            return True
        is_committed = bool(ok)
        if not is_committed and self.run.config.resilience.max_consecutive_skipped_iterations:
            self.run.loss_scale.check_progress()
        return is_committed

    def _flush(self) -> None:
        """Read all votes, and report the steps since the last log line."""
        run = self.run
        if not len(run.rows):
            return
        with run.ledger.phase("step", step=run.position.iteration):  # waiting for the device is part of the step
            self._read_votes(0)
            records = run.rows.flush()
        with run.ledger.phase("log"):
            seconds = self._busy_seconds() - self._interval_start
            summary = summarize(
                records,
                seconds,
                run.config.data.seq_length,
                self._interval_flops,
                run.ctx.mesh.world_size,
                run.peak.tflops,
            )
            wants_memory = run.config.logging.log_memory_to_tensorboard
            run.reporter.interval(records, summary, memory_bytes(run.ctx.device) if wants_memory else None)
            if run.timers.level > 0:
                run.reporter.timings(all_gather_object(run.timers.take(), run.ctx.world), summary)
            if self.on_record is not None:
                for record in records:
                    self.on_record(record)
        self._interval_flops, self._interval_start = 0.0, self._busy_seconds()

    def _log_memory(self) -> None:
        run = self.run
        with run.ledger.phase("log"):
            by_rank = all_gather_object(memory_bytes(run.ctx.device), run.ctx.world)
            run.reporter.memory(
                {rank: by_rank[rank] for rank in range(len(by_rank)) if run.ctx.mesh.coordinates(rank).dp == 0},
                run.position.iteration,
            )

    def _busy_seconds(self) -> float:
        """Seconds in steps and in waiting for their data: what a log interval's time is made of."""
        totals = self.run.ledger.totals()
        return totals.get("step", 0.0) + totals.get("data", 0.0)

    def _evaluate(self, split: str, *, is_final: bool) -> bool:
        """False when a signal broke it off."""
        run = self.run
        result = evaluate(run, split, is_final=is_final, stop=self.stop)
        if result is None:
            return False
        self.evaluations.append(result)
        run.reporter.evaluation(
            result.loss,
            result.tokens,
            split=split,
            iteration=result.iteration,
            consumed_samples=run.position.consumed_samples,
            is_final=is_final,
        )
        return True
