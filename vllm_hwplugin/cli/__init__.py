# SPDX-License-Identifier: Apache-2.0
"""The command line: `vllm-hwplugin`, also `python -m vllm_hwplugin`."""

from ._app import main, run
