"""What a checkpoint holds of a run, and what each way of starting takes from it.

    --load                       weights, optimizer, schedules, loss scale, position in the data
    --load --no-load-optim       weights and position; optimizer, loss scale and learning-rate schedule start anew, the
                                 schedule with its warm-up, as in Megatron
    --load --finetune            weights only; everything else starts at iteration 0
    --pretrained-checkpoint      as --finetune, when --load holds no checkpoint

Random state is the seed alone: initial values, dropout and data order are functions of it and of the position. A
resumed run whose --seed differs from the stored one is refused, unless --no-load-rng says that the change is meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.pieces import Piece, range_pieces
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.retention import Retention
from megatron.checkpoint.save import save_checkpoint
from megatron.config.stored import function_mismatches, to_dict
from megatron.training.setup import Position, Run


def pieces_of(run: Run, with_optimizer: bool) -> list[Piece]:
    """This rank's parts of everything that is a tensor, as live views."""
    return list(_pieces(run, with_optimizer))


def _pieces(run: Run, with_optimizer: bool) -> Iterator[Piece]:
    mesh, place = run.ctx.mesh, run.ctx.coords
    sources = [run.buckets.parameter_pieces()]
    if with_optimizer:
        sources.append(run.optimizer.state_pieces())
    for source in sources:
        for kind, spec, start, _, view, sharded_over in source:
            yield from range_pieces(kind, spec, mesh, place, start, view, sharded_over=sharded_over)


def save(run: Run) -> None:
    """Write a checkpoint of the run's iteration, all ranks together."""
    checkpoint, position = run.config.checkpoint, run.position
    title = f"saving iteration {position.iteration} to {checkpoint.save}"
    with run.ledger.phase("save", step=position.iteration), run.reporter.stage(title):
        path = save_checkpoint(
            checkpoint.save,
            position.iteration,
            run.ctx,
            pieces_of(run, with_optimizer=not checkpoint.no_save_optim),
            scalars=scalars_of(run),
            config=to_dict(run.config),
            retention=Retention(interval=checkpoint.save_retain_interval),
            log=run.reporter.say,
        )
    run.saved_iteration = position.iteration
    run.ledger.mark("durable", step=position.iteration)
    run.reporter.note(f"Saved checkpoint\tIteration: {position.iteration}")
    run.reporter.say(f"saved checkpoint of iteration {position.iteration} to {path}")


def save_if_new(run: Run) -> None:
    """Save unless --save is not given or this iteration's checkpoint exists already."""
    if run.config.checkpoint.save and run.saved_iteration != run.position.iteration:
        save(run)


def scalars_of(run: Run) -> dict[str, Any]:
    """Everything that is not a tensor, as JSON."""
    checkpoint, position = run.config.checkpoint, run.position
    scalars: dict[str, Any] = {
        "iteration": position.iteration,
        "consumed_samples": position.consumed_samples,
        "num_skipped": position.num_skipped,
        "dataset_samples": position.dataset_samples,
    }
    if not checkpoint.no_save_optim:
        scalars["optimizer"] = run.optimizer.state_dict()
        scalars["loss_scale"] = run.loss_scale.state_dict()
        scalars["opt_param_scheduler"] = run.scheduler.state_dict()
    if not checkpoint.no_save_rng:
        scalars["rng"] = {"seed": run.config.training.seed}
    return scalars


def load(run: Run) -> None:
    """Put the run where its checkpoint, if any, left off; all ranks together.

    Raises CheckpointError when a wanted checkpoint is missing or damaged, ValueError when it does not fit the flags.
    """
    checkpoint = run.config.checkpoint
    with run.ledger.phase("load"):
        found = None
        if checkpoint.load is not None:
            is_required = checkpoint.exit_on_missing_checkpoint or (
                checkpoint.finetune and checkpoint.pretrained_checkpoint is None
            )
            found = _read(
                run, checkpoint.load, weights_only=checkpoint.finetune, is_required=is_required, flag="--load"
            )
        if found is None and checkpoint.pretrained_checkpoint is not None:
            flag = "--pretrained-checkpoint"
            _read(run, checkpoint.pretrained_checkpoint, weights_only=True, is_required=True, flag=flag)
    run.saved_iteration = run.position.iteration
    run.ledger.mark("loaded", step=run.position.iteration)


def _read(run: Run, path: str, *, weights_only: bool, is_required: bool, flag: str) -> Checkpoint | None:
    checkpoint = run.config.checkpoint
    with_optimizer = not (weights_only or checkpoint.no_load_optim)
    found = load_checkpoint(
        path,
        run.ctx,
        pieces_of(run, with_optimizer),
        ckpt_step=checkpoint.ckpt_step if flag == "--load" else None,
        required=is_required,
        flag=flag,
        log=run.reporter.say,
    )
    if found is None:
        return None
    mismatches = function_mismatches(run.config.model, found.config)
    if mismatches:
        raise ValueError(f"{flag} {path} holds another model: {'; '.join(mismatches)}")
    if with_optimizer:
        run.optimizer.publish()
    else:
        run.optimizer.sync_master_from_params()
    if weights_only:
        run.reporter.say(
            f"loaded the weights of iteration {found.iteration} from {found.path}; starting at iteration 0"
        )
        return found
    scalars = found.scalars
    run.position = Position(
        iteration=scalars["iteration"],
        consumed_samples=scalars["consumed_samples"],
        num_skipped=scalars["num_skipped"],
        dataset_samples=scalars["dataset_samples"],
    )
    _check_seed(run, scalars)
    if with_optimizer:
        _restore_optimizer(run, scalars)
    else:
        run.reporter.say(
            "--no-load-optim: optimizer states and the learning-rate schedule start anew, warm-up included"
        )
    run.reporter.say(f"loaded checkpoint of iteration {found.iteration} from {found.path}")
    return found


def _restore_optimizer(run: Run, scalars: dict[str, Any]) -> None:
    flags = run.config.optimizer
    run.optimizer.load_state_dict(scalars["optimizer"])
    run.loss_scale.load_state_dict(scalars["loss_scale"])
    for line in run.scheduler.load_state_dict(
        scalars["opt_param_scheduler"],
        override=flags.override_opt_param_scheduler,
        use_checkpoint=flags.use_checkpoint_opt_param_scheduler,
    ):
        run.reporter.say(line)


def _check_seed(run: Run, scalars: dict[str, Any]) -> None:
    stored, seed = scalars.get("rng", {}).get("seed"), run.config.training.seed
    if stored is not None and stored != seed and not run.config.checkpoint.no_load_rng:
        raise ValueError(
            f"--seed {seed} differs from the checkpoint's {stored}: dropout and the order of samples would change in "
            f"the middle of the run; use --seed {stored}, or --no-load-rng if the change is meant"
        )
