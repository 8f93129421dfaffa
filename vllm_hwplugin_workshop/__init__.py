# SPDX-License-Identifier: Apache-2.0
"""For who maintains patches: making them of diffs, and checking them on versions of vLLM that are not installed.

No process of vLLM imports it. The commands `drift` and `patches` do, when they run.
"""
