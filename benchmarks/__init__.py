# SPDX-License-Identifier: Apache-2.0
"""Development tools: what the project's figures are made with, and the pages that are made of them.

They are no part of the wheel. What a user measures with is ``vllm-hwplugin bench``.
"""
