# SPDX-License-Identifier: Apache-2.0
"""The plugin's own operations and the kernels behind them (docs/kernels.md).

Nothing is imported here: ``compile`` serves processes without torch, and the modules of the operations need it.
"""
