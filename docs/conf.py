# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: ``make docs``. The pages are the same files that are read in the checkout.

The root is the repository's, so that links of a page lead on the site where they lead in a checkout: to another page,
or to a file, which the site then has for download. What leads nowhere is an error.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = "ds_fuyou"
author = "the ds_fuyou authors"
release = re.findall(r'__version__ = "(.+)"', (ROOT / "ds_fuyou/version.py").read_text(encoding="utf-8"))[0]

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["README.md", "docs/**.md", "benchmarks/results/*.md", "tests/device/README.md"]
exclude_patterns = [".*", "build", "dist", "*.egg-info", "ds_fuyou", "op_builder"]
suppress_warnings = ["toc.not_included"]  # what a page links to need not stand in the list of pages
myst_heading_anchors = 4
nitpicky = True
nitpick_ignore = [("myst", "../benchmarks/results")]  # a folder is no page: its name stays

html_theme = "furo"
html_title = f"ds_fuyou {release}"
html_show_sourcelink = False
html_copy_source = False
