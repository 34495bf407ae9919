"""The flag reference docs/flags.md, generated: `python -m megatron.config.document > docs/flags.md`."""

from __future__ import annotations

from megatron.config.command_line import metavar
from megatron.config.flags import Option, concern_summary, concern_title, help_texts, options
from megatron.config.megatron_flags import DIFFERENCES, NO_EFFECT, RENAMED
from megatron.config.megatron_refused import REFUSED
from megatron.config.run import CONCERNS

_HEAD = """# Flags

Generated from `megatron/config` by `python -m megatron.config.document > docs/flags.md`; do not edit.

- Names, types, defaults and meanings are Megatron-LM's, except where a line says *differs*. *Ours* marks flags that it
  does not have.
- A flag that stands twice counts the last time, so a script's arguments can be overridden by those after them.
- Every switch can be taken back: `--no-swiglu` undoes `--swiglu`, `--bias-linear` undoes `--disable-bias-linear`. The
  value `None` gives a flag whose default is none back its default: `--train-samples None`.
- `--config run.yaml` reads flags from a file (YAML or JSON): keys are flag names with `-` or `_`, nested in sections as
  you like; a switch is `true` or `false`; typed flags win.
- With `--use-checkpoint-args` the model, its sequence length and its tokenizer come from the checkpoint where they are
  not typed. Precedence: typed, file, stored, default. Layout, batch, data and optimizer are never taken.
- All problems are reported at once, one line each, and the program exits with 2 before anything is built.
"""


def reference() -> str:
    """The whole of docs/flags.md."""
    parts = [_HEAD]
    for concern in CONCERNS.values():
        texts = help_texts(concern)
        parts.append(f"\n## {concern_title(concern).capitalize()}\n\n{concern_summary(concern)}\n")
        parts.extend(_entry(option, texts[option.field]) for option in options(concern))
    parts.append("\n## Old spellings\n")
    parts.extend(f"- `{old}` is read as `{' '.join(new)}`." for old, new in RENAMED.items())
    parts.append("\n## Accepted without effect\n\nA line at the start says so.\n")
    parts.extend(_table(NO_EFFECT))
    parts.append("\n## Refused\n\nThe sentence is what the program prints.\n")
    parts.extend(_table(REFUSED))
    return "\n".join(parts) + "\n"


def _entry(option: Option, text: str) -> str:
    names = ", ".join(f"`{name}`" for name in option.names)
    if option.kind is not bool:
        value = metavar(option)
        names += " " + (value if isinstance(value, str) else " ".join(value)).replace("|", "\\|")
        names += " ..." if option.nargs in ("*", "+") else ""
    marks = " *Ours.*" if option.own and option.field not in DIFFERENCES else ""
    if option.field in DIFFERENCES:
        marks += f" *Differs: {DIFFERENCES[option.field]}*"
    default = "" if option.kind is bool or option.default is None else f" Default: {option.default}."
    return f"- {names}: {text}{default}{marks}"


def _table(table: dict[str, str]) -> list[str]:
    """- flags: sentence."""
    lines = []
    for sentence, entries in table.items():
        names = ", ".join(f"`{entry.partition('=')[0]}`" for entry in entries.split())
        lines.append(f"- {sentence[0].upper()}{sentence[1:]}: {names}")
    return lines


if __name__ == "__main__":
    print(reference(), end="")
