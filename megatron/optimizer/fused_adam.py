"""Adam by the fused kernels of apex or Transformer Engine, where chosen with --adam-backend; GPUs only.

Both offer the same "capturable" kernel: learning rate, step and skip flag are device tensors, so a step is skipped
without the host. The one file that imports them for the optimizer; it refuses at the flag when they are missing or
differ.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence

import torch

from megatron.optimizer.rules import UpdateSettings

_SOURCES = {
    # backend -> (module of the FusedAdam class, module of multi_tensor_applier, module of the kernel, what to install)
    "apex": ("apex.optimizers", "apex.multi_tensor_apply", "amp_C", "NVIDIA apex with --cpp_ext --cuda_ext"),
    "transformer_engine": (
        "transformer_engine.pytorch.optimizers",
        "transformer_engine.pytorch.optimizers",
        "transformer_engine_torch",
        "transformer-engine[pytorch]",
    ),
}
_EXPECTED = {"params", "lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay", "capturable"}
_ADAMW_MODE = 1
_BIAS_CORRECTION = 1


class ImportedAdam:
    """`UpdateRule` of Adam by an imported kernel.

    Args:
        applier: calls a kernel on lists of tensors in chunks, with a skip flag.
        kernel: `multi_tensor_adam_capturable` of the library.
        beta1, beta2, eps: as in `adam.Adam`.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, applier: Callable, kernel: Callable, *, beta1: float, beta2: float, eps: float):
        self.applier, self.kernel = applier, kernel
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def update_(
        self, weights: torch.Tensor, grads: torch.Tensor, states: Sequence[torch.Tensor], settings: UpdateSettings
    ) -> None:
        """See `UpdateRule.update_`; the kernel multiplies gradients by an inverse scale."""
        device = weights.device
        one = torch.ones(1, dtype=torch.float32, device=device)
        skip = (
            torch.zeros(1, dtype=torch.int32, device=device) if settings.skip is None else settings.skip.int().view(1)
        )
        self.applier(
            self.kernel,
            skip,
            [[grads], [weights], [states[0]], [states[1]]],
            torch.full((1,), settings.lr, dtype=torch.float32, device=device),
            self.beta1,
            self.beta2,
            self.eps,
            settings.step.int().view(1),
            _ADAMW_MODE,
            _BIAS_CORRECTION,
            settings.weight_decay,
            one if settings.divisor is None else settings.divisor.reciprocal().view(1),
        )


def imported_adam(backend: str, *, beta1: float, beta2: float, eps: float) -> ImportedAdam:
    """The rule of `backend`; ValueError when the library is missing or is not the one we know."""
    classes, appliers, kernels, package = _SOURCES[backend]
    try:
        fused = importlib.import_module(classes).FusedAdam
        applier = importlib.import_module(appliers).multi_tensor_applier
        kernel = importlib.import_module(kernels).multi_tensor_adam_capturable
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--adam-backend {backend} needs {package}, which cannot be used here ({error}); install it or use "
            "--adam-backend torch"
        ) from error
    missing = _EXPECTED - set(inspect.signature(fused.__init__).parameters)
    if missing:
        raise ValueError(
            f"--adam-backend {backend}: its FusedAdam lacks {', '.join(sorted(missing))}, so it is no version we know; "
            "install a current one or use --adam-backend torch"
        )
    return ImportedAdam(applier, kernel, beta1=beta1, beta2=beta2, eps=eps)
