"""Documents that stay true: links lead somewhere, and every command shown is run, checked, or has a reason not to be.

A fenced ```bash block follows a comment that says what happens to it here:
  <!-- ci: run -->          run, together with all others of its page, in order, in one shell
  <!-- ci: script -->       `bash FILE ...`: the file exists and parses; it is run as a whole elsewhere
  <!-- ci: fails N -->      run; leaves with code N
  <!-- ci: none (why) -->   not run, for the reason given
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md")])
BLOCK = re.compile(r"(?:<!-- ci: (?P<what>[^\n]*) -->\n)?```bash\n(?P<code>.*?)```", re.DOTALL)


class Command(NamedTuple):
    """A block of shell commands and what is done with it."""

    page: Path
    what: str | None
    code: str


def blocks(page: Path) -> list[Command]:
    return [Command(page, found["what"], found["code"]) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def shell(code: str, folder: Path) -> subprocess.CompletedProcess:
    """Runs `code` in a copy of the program's top folder, so that nothing is written into the repository."""
    for name in ("pretrain_gpt.py", "megatron", "tools", "examples", "scripts"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, words in (("python", ""), ("torchrun", " -m torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_in_text_exist(page):
    """`megatron/...`, `tools/...` and the like in backticks are files or folders of this repository."""
    for path in re.findall(
        r"`((?:megatron|tools|tests|examples|scripts|docs)/[\w./-]*)`", page.read_text(encoding="utf-8")
    ):
        if page.name == "from_megatron.md" and not (ROOT / path).exists():
            lines = [line for line in page.read_text(encoding="utf-8").splitlines() if f"`{path}" in line]
            assert all(line.startswith("|") and f"`{path}" in line.split("|")[1] for line in lines), path
            continue
        assert (ROOT / path).exists(), f"{name_of(page)} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_says_what_ci_does_with_it(page):
    for command in blocks(page):
        assert command.what, f"{name_of(page)}: no `ci:` comment before\n{command.code}"
        assert re.fullmatch(r"run|script|fails \d+|none \(.+\)", command.what), command.what


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_scripts_named_exist_and_parse(page):
    for command in blocks(page):
        if command.what == "script":
            word, script = command.code.split()[:2]
            assert word == "bash"
            subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.what == "run" for b in blocks(page))], ids=name_of)
def test_commands_run(page, tmp_path):
    code = "\n".join(command.code for command in blocks(page) if command.what == "run")
    result = shell(code, tmp_path)
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    if page == ROOT / "README.md":
        assert "loaded checkpoint of iteration 4" in result.stdout
        assert (tmp_path / "demo" / "loss.png").stat().st_size > 1000
        shutil.rmtree(tmp_path / "demo")


@pytest.mark.parametrize(
    "command",
    [b for page in PAGES for b in blocks(page) if (b.what or "").startswith("fails")],
    ids=lambda b: b.page.name,
)
def test_commands_that_fail_say_why(command, tmp_path):
    result = shell(command.code, tmp_path)
    assert result.returncode == int(command.what.split()[1]), result.stderr
    assert "error:" in result.stderr and "Traceback" not in result.stderr


def test_every_reason_is_in_the_index():
    index = (ROOT / "docs" / "reasons" / "README.md").read_text(encoding="utf-8")
    pages = sorted(path.name for path in (ROOT / "docs" / "reasons").glob("*.md") if path.name != "README.md")
    assert sorted(re.findall(r"\]\((\w+\.md)\)", index)) == pages
