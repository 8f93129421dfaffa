# SPDX-License-Identifier: Apache-2.0
"""The plugin's own operations and their kernels (docs/kernels.md).

It imports nothing: processes without torch use ``compile``, and the modules of the operations need torch.
"""
