# SPDX-License-Identifier: Apache-2.0
"""docs/combinations.md names everything that is refused, with the reason the error gives."""

from __future__ import annotations

from pathlib import Path

from ds_fuyou.ds_json import refused_combinations

PAGE = Path(__file__).resolve().parents[2] / "docs" / "combinations.md"


def test_every_refused_key_is_listed_with_its_reason() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [key for key, reason in refused_combinations() if f"| `{key}` | {reason} |" not in page]
    assert missing == []
