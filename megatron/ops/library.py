"""Our operators in torch's dispatcher: one name, and a kernel for each kind of device, the pretended one included.

The kernel that runs follows from where the tensors live, inside the dispatcher; what an operator allocates on Meta is
what its GPU kernel allocates, so that a dry run sees the memory of the real one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

LIBRARY = torch.library.Library("megatron", "DEF")


def define(schema: str, default: Callable, **kernels: Callable) -> None:
    """Define `schema`; `default` runs where no kernel is given by its dispatch key (CPU=..., Meta=...)."""
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, default, "CompositeExplicitAutograd")
    for key, kernel in kernels.items():
        LIBRARY.impl(name, kernel, key)
