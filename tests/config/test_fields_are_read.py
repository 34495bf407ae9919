"""No option is ignored: every field is read outside the configuration, or by a property of it that is."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from megatron.config.flags import options
from megatron.config.run import CONCERNS

ROOT = Path(__file__).parents[2]
# Fields that only the configuration itself needs.
OF_THE_CONFIGURATION = {
    "config",  # names the file of flags
    "add_position_embedding",  # old spelling, checked against --position-embedding-type
    "use_checkpoint_args",  # parse asks for the stored configuration
    "use_tokenizer_model_from_checkpoint_args",
    "num_experts",  # refused as not yet supported
    "moe_router_topk",
    "expert_model_parallel_size",
    "context_parallel_size",
}


def attributes(paths: Iterable[Path]) -> set[str]:
    """Every name that is read as an attribute, or spelled as a whole string (for getattr and tables)."""
    names = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def properties_read(names: set[str]) -> set[str]:
    """Attributes that the properties and functions of the configuration read, where `names` holds them."""
    found: set[str] = set()
    functions = [
        node
        for path in sorted((ROOT / "megatron" / "config").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    while True:
        more = {
            inner.attr
            for function in functions
            if function.name in names | found
            for inner in ast.walk(function)
            if isinstance(inner, ast.Attribute)
        } | {
            inner.func.id
            for function in functions
            if function.name in names | found
            for inner in ast.walk(function)
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name)
        }
        if more <= found:
            return found
        found |= more


def test_every_field_is_read():
    library = [path for path in (ROOT / "megatron").rglob("*.py") if path.parent.name != "config"]
    read = attributes([*library, *(ROOT / "tools").rglob("*.py"), ROOT / "pretrain_gpt.py"])
    # Checking a field is not using it.
    read -= {"problems", "parse", "parse_or_exit", "describe", "derived", "to_dict", "function_mismatches"}
    read |= properties_read(read)
    fields = {option.field for concern in CONCERNS.values() for option in options(concern)}
    assert sorted(fields - read - OF_THE_CONFIGURATION) == []
