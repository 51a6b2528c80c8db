# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
from pathlib import Path

from ds_fuyou.config import FuyouConfig, PlanOverrides

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_settings_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate_settings", DOCS / "generate_settings.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == generator.render(), "run: make docs"


def test_every_key_is_described() -> None:
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    for model in (FuyouConfig, PlanOverrides):
        for name, field in model.model_fields.items():
            assert name in text
            assert field.description or hasattr(field.annotation, "model_fields"), name
