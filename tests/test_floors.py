"""The decisions about structure as tests: floors, no torch below floor 2, sizes, names, docstrings, no global state.

Everything is read from the source text, so a fork's additions are checked too: a new package gets a line in FLOORS.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    "config": 0, "topology": 0, "ledger": 0,
    "schedules": 1,
    "distributed": 2,
    "ops": 3,
    "tensor_parallel": 4, "context_parallel": 4, "expert_parallel": 4, "data_parallel": 4, "pipeline_parallel": 4,
    "models": 5, "optimizer": 5, "datasets": 5,
    "checkpoint": 6, "planner": 6, "resilience": 6,
    "training": 7,
}  # fmt: skip
WITHOUT_TORCH = ("config", "topology", "ledger", "schedules")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_COLUMNS = 450, 80, 120
NAMELESS = {"utils.py", "helpers.py", "common.py", "misc.py"}
KNOWS_CUDA = {"megatron/distributed/launch.py", "megatron/distributed/device.py"}
KNOWS_TRANSFORMER_ENGINE = "megatron/ops/te.py"


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


LIBRARY = sorted((ROOT / "megatron").rglob("*.py"))
PROGRAMS = [*python_files("tools", "examples", "scripts"), *sorted(ROOT.glob("*.py"))]
EVERYTHING = [*LIBRARY, *PROGRAMS, *python_files("tests")]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, those inside functions too."""
    module = name_of(path).removesuffix(".py").split("/")
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*module[: -node.level], node.module or ""] if node.level else [node.module or ""]
            base = ".".join(part for part in base if part)
            if base == "megatron":
                yield from ((node.lineno, f"megatron.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, base


def package_of(dotted: str) -> str | None:
    parts = dotted.split(".")
    return parts[1] if parts[0] == "megatron" and len(parts) > 1 else None


def report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def test_every_package_has_a_floor():
    packages = {path.parent.name for path in (ROOT / "megatron").glob("*/*.py")}
    report([f"megatron/{package} has no floor; add it to FLOORS" for package in sorted(packages - set(FLOORS))])


def test_imports_go_downward():
    problems = []
    for path in LIBRARY:
        mine = package_of(name_of(path).removesuffix(".py").replace("/", "."))
        for line, dotted in imported(path):
            other = package_of(dotted)
            if mine in FLOORS and other in FLOORS and mine != other and FLOORS[other] >= FLOORS[mine]:
                problems.append(
                    f"{name_of(path)}:{line}: {mine} (floor {FLOORS[mine]}) imports {other} (floor {FLOORS[other]})"
                )
    report(problems)


def test_nothing_in_the_library_imports_programs_or_tests():
    report(
        [
            f"{name_of(path)}:{line} imports {dotted}"
            for path in LIBRARY
            for line, dotted in imported(path)
            if dotted.split(".")[0] in ("tools", "examples", "scripts", "tests", "pretrain_gpt")
        ]
    )


def test_low_floors_name_only_the_standard_library():
    allowed = {*sys.stdlib_module_names, "megatron", "yaml"}
    report(
        [
            f"{name_of(path)}:{line} imports {dotted}"
            for package in WITHOUT_TORCH
            for path in sorted((ROOT / "megatron" / package).rglob("*.py"))
            for line, dotted in imported(path)
            if dotted.split(".")[0] not in allowed
        ]
    )


def test_low_floors_import_where_torch_cannot_be():
    """The same, as it happens: the low floors in one interpreter in which torch and numpy do not exist."""
    modules = [
        name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for package in WITHOUT_TORCH
        for path in sorted((ROOT / "megatron" / package).rglob("*.py"))
        if path.name != "__main__.py"
    ]
    code = "import sys, importlib\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in ("torch", "numpy"))
    code += f"for name in {modules!r}:\n    importlib.import_module(name)\n"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_size_and_manners(path):
    text = path.read_text(encoding="utf-8")
    tree, lines, problems = parsed(path), text.split("\n"), []
    if len(lines) - 1 > MAX_FILE_LINES:
        problems.append(f"{len(lines) - 1} lines, the ceiling is {MAX_FILE_LINES}")
    if path.name in NAMELESS:
        problems.append("name the thing: no utils, helpers, common, misc")
    if text.strip() and not ast.get_docstring(tree):
        problems.append("no module docstring")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            problems.append(f"line {number} has {len(line)} columns")
        if ("TO" + "DO") in line or ("FIX" + "ME") in line:
            problems.append(f"line {number}: an issue tracker is the place for this")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            problems.append(f"line {node.lineno}: global statement")
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            problems.append(f"line {node.lineno}: bare except")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                problems.append(
                    f"line {node.lineno}: {node.name} has {length} lines, the ceiling is {MAX_FUNCTION_LINES}"
                )
    report(problems)


def public_names(path: Path) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Public functions, classes and methods; a configuration class is described by its module's docstring."""
    tree = parsed(path)
    is_config = path.parent.name == "config" or path.name == "config.py"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if not (is_config and node.name.endswith("Config")):
                yield node
            if isinstance(node, ast.ClassDef):
                yield from (
                    item for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")
                )


@pytest.mark.parametrize("path", [*LIBRARY, *PROGRAMS], ids=name_of)
def test_public_names_have_docstrings(path):
    report(
        [
            f"line {node.lineno}: {node.name}"
            for node in public_names(path)
            if not ast.get_docstring(node) and node.end_lineno - node.lineno + 1 > 6
        ]
    )


def test_only_two_files_know_cuda():
    """Elsewhere the device is `ctx.device`; so the CPU path is the GPU path."""
    report(
        [
            f"{name_of(path)}:{number}: {line.strip()}"
            for path in LIBRARY
            if name_of(path) not in KNOWS_CUDA
            for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
            if "torch.cuda" in line or '"cuda"' in line or ".is_cuda" in line or ".cuda()" in line
        ]
    )


def test_only_one_file_imports_transformer_engine():
    report(
        [
            f"{name_of(path)}:{line}"
            for path in [*LIBRARY, *PROGRAMS]
            for line, dotted in imported(path)
            if dotted.split(".")[0] == "transformer_engine" and name_of(path) != KNOWS_TRANSFORMER_ENGINE
        ]
    )


MUTATING = {"append", "extend", "add", "update", "setdefault", "pop", "clear", "insert", "remove", "popitem", "discard"}


def test_no_mutable_module_state():
    """A function that changes a container bound at module level keeps state that no owner resets.

    Registries are filled while importing, by functions named `register*`, and allowed.
    """
    problems = []
    for path in LIBRARY:
        tree = parsed(path)
        names = {
            target.id
            for node in tree.body
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
            and isinstance(node.value, (ast.Dict, ast.List, ast.Set, ast.Call, ast.DictComp))
        }
        registering = {
            inner
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef) and function.name.startswith(("register", "_register"))
            for inner in ast.walk(function)
        }
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function not in registering:
                problems += [f"{name_of(path)}:{line}: {name}" for line, name in changes(function) if name in names]
    report(problems)


def changes(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """(line, name) of containers that `function` changes and does not bind itself."""
    own = {arg.arg for arg in [*function.args.args, *function.args.kwonlyargs]}
    own |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(function):
        target = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING:
            target = node.func.value
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            target = node.value
        if isinstance(target, ast.Name) and target.id not in own:
            yield node.lineno, target.id


CONFIG = sorted((ROOT / "megatron" / "config").glob("*.py"))


@pytest.mark.parametrize("path", CONFIG, ids=name_of)
def test_every_configuration_field_has_its_help_under_it(path):
    """A frozen keyword-only dataclass whose every field is followed by a string: the one documentation of the flag."""
    problems = []
    for node in parsed(path).body:
        if not (isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.name != "RunConfig"):
            continue
        options = {
            keyword.arg: getattr(keyword.value, "value", None)
            for decorator in node.decorator_list
            if isinstance(decorator, ast.Call)
            for keyword in decorator.keywords
        }
        if not (options.get("frozen") and options.get("kw_only")):
            problems.append(f"line {node.lineno}: {node.name} is not a frozen keyword-only dataclass")
        for item, after in zip(node.body, [*node.body[1:], None]):
            if isinstance(item, ast.AnnAssign) and not (
                isinstance(after, ast.Expr) and isinstance(getattr(after.value, "value", None), str)
            ):
                problems.append(f"line {item.lineno}: {item.target.id} has no help under it")
    report(problems)


def test_the_suite_mirrors_the_library():
    """Every package of megatron/ has a folder of the same name here."""
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} & set(FLOORS)
    missing = [
        package for package in sorted({path.parent.name for path in LIBRARY} & set(FLOORS)) if package not in folders
    ]
    report([f"megatron/{package} has no tests/{package}/" for package in missing])
