"""Messages between two members of a group, posted together so that no order of sends and receives can block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.distributed.collectives import Group
from megatron.distributed.transport import Work


def exchange(
    group: Group,
    sends: Sequence[tuple[int, torch.Tensor]] = (),
    receives: Sequence[tuple[int, torch.Tensor]] = (),
) -> list[Work]:
    """Post all sends and receives ((peer index in `group`, contiguous tensor)); one `Work` each, sends first.

    Messages between the same two members match in the order they were posted. A sent tensor must stay unchanged, and a
    received one unread, until its `wait()` returns. Nothing here blocks.
    """
    for peer, tensor in (*sends, *receives):
        assert 0 <= peer < group.size and peer != group.rank, f"peer {peer} of {group}"
        assert tensor.is_contiguous()
    if not sends and not receives:
        return []
    return group.transport.exchange(sends, receives)
