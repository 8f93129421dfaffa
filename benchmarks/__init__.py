# SPDX-License-Identifier: Apache-2.0
"""Development tools: measurements of the project's figures, and the pages with them.

They are not in the wheel. Users measure with ``vllm-hwplugin bench``.
"""
