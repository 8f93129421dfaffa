# SPDX-License-Identifier: Apache-2.0
"""Tools for maintainers of patches: make them from diffs, check them on vLLM versions that are not installed.

Only the commands `drift` and `patches` import this package, never a vLLM process.
"""
