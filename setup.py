# SPDX-License-Identifier: Apache-2.0
"""The part of the build that pyproject.toml cannot say.

``patches/`` and ``csrc/`` are rooms of their own in the source tree, because they are read and edited apart from the
Python code; in the wheel they lie inside the package, where ``vllm_hwplugin`` finds them next to itself. Nothing is
compiled: the wheel is pure Python, and ``csrc/`` holds no kernel in this release.
"""

from setuptools import find_packages, setup

DATA_FOLDERS = {"vllm_hwplugin.patches": "patches", "vllm_hwplugin.csrc": "csrc"}

setup(
    packages=[*find_packages(include=["vllm_hwplugin", "vllm_hwplugin.*"]), *DATA_FOLDERS],
    package_dir=DATA_FOLDERS,
    package_data={"vllm_hwplugin": ["py.typed"], **{name: ["**/*"] for name in DATA_FOLDERS}},
)
