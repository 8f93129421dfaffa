# SPDX-License-Identifier: Apache-2.0
"""Do vLLM's attention backends do, on this host's device, what their classes say?

``vllm-hwplugin probe`` starts `_child` in a process of its own, which runs each backend through `_vllm`, and holds the
answers to `reference`. What is imported here imports neither torch nor vLLM.
"""

from ._cases import CAPABILITIES, Case, Plain, Request, Trial, draw, trials
from ._session import Job, ProbeError, judge, one_line, probe

__all__ = [
    "CAPABILITIES",
    "Case",
    "Job",
    "Plain",
    "ProbeError",
    "Request",
    "Trial",
    "draw",
    "judge",
    "one_line",
    "probe",
    "trials",
]
