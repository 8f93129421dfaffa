# SPDX-License-Identifier: Apache-2.0
"""Check whether attention backends do what their classes declare, on this host's device.

``vllm-hwplugin probe`` starts `_child` in a child process, which runs each backend through `_vllm` and compares it with
`reference`. This module's imports load neither torch nor vLLM.
"""

from ._cases import CAPABILITIES, Case, Plain, Request, draw, trials
from ._session import Job, ProbeError, judge, one_line, probe
