"""Which layers of a model differ from the others: every N-th one, or a list with a 0 or 1 for each layer.

A list may be written short, as in "([1]*3+[0])*4". It is evaluated here and not by Python, which would run anything.
"""

from __future__ import annotations

import ast

MAX_LAYERS = 100_000


def parse_layer_pattern(text: str) -> str:
    """`text` itself, if it is a pattern; ValueError says what was expected."""
    pattern = evaluate(text)
    if isinstance(pattern, int) and pattern < 1:
        raise ValueError("every N-th layer needs an N of at least 1")
    return text.strip()


def evaluate(text: str) -> int | tuple[int, ...]:
    """The number N, or the list, that `text` spells; ValueError if it is neither."""
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        value = None
    if value is None or isinstance(value, tuple) and not set(value) <= {0, 1}:
        raise ValueError("expected a whole number N, or a list of 0 and 1 such as [1,1,0] or ([1]*3+[0])*4")
    return value


def layers_of(text: str, num_layers: int, *, every_nth: bool) -> tuple[bool, ...]:
    """For each layer whether the pattern says 1; a number N says `every_nth` of layers N, 2 N, ..., counted from 1, and
    the opposite of the others."""
    pattern = evaluate(text)
    if isinstance(pattern, tuple):
        return tuple(map(bool, pattern))
    return tuple((number % pattern == 0) == every_nth for number in range(1, num_layers + 1))


def as_list(layers: tuple[bool, ...]) -> str:
    """The pattern as a list."""
    return f"[{','.join(str(int(layer)) for layer in layers)}]"


def _value(node: ast.expr) -> int | tuple[int, ...] | None:
    """Of whole numbers, lists of them, + and *; None for anything else or too long a list."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, (ast.List, ast.Tuple)):
        items = tuple(_value(item) for item in node.elts)
        return items if all(isinstance(item, int) for item in items) else None
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Add) and type(left) is type(right) and left is not None:
        return left + right
    if not isinstance(node.op, ast.Mult) or left is None or right is None:
        return None
    if isinstance(left, tuple) and isinstance(right, tuple):
        return None
    size = (len(left) if isinstance(left, tuple) else left) * (len(right) if isinstance(right, tuple) else right)
    return left * right if size <= MAX_LAYERS else None
