# SPDX-License-Identifier: Apache-2.0
"""Measuring tools: engines with and without the plugin, single kernels, and probes of attention backends.

Only the commands `bench`, `demo` and `probe` and their child processes import this package, never a serving process.
"""
