# SPDX-License-Identifier: Apache-2.0
"""Run vLLM engines in processes of their own and measure them: what ``demo`` and ``bench`` share.

A side (stock or patched) is a :class:`Job`; :func:`launch` runs it in a fresh process and returns an :class:`Outcome`,
also when the engine crashed. Nothing here imports torch or vLLM except the child process (``_engine``).
"""

from ._checkpoints import DRAFT_TOKENS, Checkpoints, CheckpointsMissing, find_checkpoints, load_prompts
from ._host import Host, HostUnknown, detect_host
from ._job import Event, Job, Outcome, Workload, acceptance_length
from ._launch import launch
from ._settings import engine_environment, engine_options

__all__ = [
    "DRAFT_TOKENS",
    "Checkpoints",
    "CheckpointsMissing",
    "Event",
    "Host",
    "HostUnknown",
    "Job",
    "Outcome",
    "Workload",
    "acceptance_length",
    "detect_host",
    "engine_environment",
    "engine_options",
    "find_checkpoints",
    "launch",
    "load_prompts",
]
