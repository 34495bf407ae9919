"""docs/flags.md is what the configuration says."""

from __future__ import annotations

from pathlib import Path

from megatron.config.document import reference


def test_the_flag_reference_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "flags.md"
    assert page.read_text() == reference(), "run: python -m megatron.config.document > docs/flags.md"
