# SPDX-License-Identifier: Apache-2.0
"""Do vLLM's attention backends do, on this host's device, what their classes say?

``vllm-hwplugin probe`` starts `_child` in a process of its own, which runs each backend through `_vllm`, and holds the
answers to `_reference`. This package imports neither torch nor vLLM; those two modules do.
"""

from ._cases import CAPABILITIES, Case, Plain, Request, Trial, draw, trials
from ._session import MODULE, Job, ProbeError, Report, Result, probe
from ._verdict import Behaviour, Declared, Judged, Verdict, judge

__all__ = [
    "CAPABILITIES",
    "MODULE",
    "Behaviour",
    "Case",
    "Declared",
    "Job",
    "Judged",
    "Plain",
    "ProbeError",
    "Report",
    "Request",
    "Result",
    "Trial",
    "Verdict",
    "draw",
    "judge",
    "probe",
    "trials",
]
