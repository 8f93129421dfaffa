# SPDX-License-Identifier: Apache-2.0
"""Attention backends that declare what they can do, and the probe that checks it. Importing this imports no vLLM."""
