# SPDX-License-Identifier: Apache-2.0
"""Lists the packages; everything else is in pyproject.toml.

The list is computed because the C++ sources travel as package data of namespace packages, and because
the top-level folder op_builder/ is installed under another name (see package-dir there).
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(include=["ds_fuyou", "ds_fuyou.*"], exclude=["*.__pycache__*"]),
        "ds_fuyou.op_builder",
    ]
)
