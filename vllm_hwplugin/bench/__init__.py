# SPDX-License-Identifier: Apache-2.0
"""Run vLLM engines in processes of their own and measure them: what ``demo``, ``bench`` and ``probe`` share.

A side (stock or patched) is a :class:`Job`; :func:`launch` runs it in a fresh process and returns an :class:`Outcome`,
also when the engine crashed. Nothing here imports torch or vLLM except the child process (``_engine``).

``soak`` and ``micro`` below it are other kinds of runs: a load that keeps changing, and single kernels.
"""

from ._checkpoints import DRAFT_TOKENS, Checkpoints, CheckpointsMissing, find_checkpoints, load_prompts
from ._host import Host, HostUnknown, detect_host
from ._job import Event, Job, Outcome, Workload, acceptance_length
from ._launch import Ended, launch, run_child
from ._plan import (
    ALL_SIDES,
    MRV2_SIDES,
    SIDES,
    STOCK_OF,
    TINY,
    Case,
    NotOnThisHost,
    Settings,
    cases,
    check,
    job_for,
    possible_sides,
    shapes_folder,
)
from ._results import (
    FORMAT,
    PHASES_FORMAT,
    add_case,
    add_phases,
    new_phases,
    new_results,
    provenance,
    stopped,
)
from ._session import TimeLimit
from ._settings import engine_environment, engine_options
from ._shapes import METHODS, SHAPES
from ._table import (
    LEAST_US,
    NOT_MEASURED,
    SIDE_NAMES,
    Row,
    comparisons,
    host_line,
    idle,
    own_us,
    profiled,
    ratio_name,
    rows,
    shown_phases,
    sides_of,
    speed,
    step,
    step_ms,
    steps,
    table,
)
from ._turns import PHASES, measure_in_turn, of_workloads

__all__ = [
    "ALL_SIDES",
    "DRAFT_TOKENS",
    "FORMAT",
    "LEAST_US",
    "METHODS",
    "MRV2_SIDES",
    "NOT_MEASURED",
    "PHASES",
    "PHASES_FORMAT",
    "SHAPES",
    "SIDES",
    "SIDE_NAMES",
    "STOCK_OF",
    "TINY",
    "Case",
    "Checkpoints",
    "CheckpointsMissing",
    "Ended",
    "Event",
    "Host",
    "HostUnknown",
    "Job",
    "NotOnThisHost",
    "Outcome",
    "Row",
    "Settings",
    "TimeLimit",
    "Workload",
    "acceptance_length",
    "add_case",
    "add_phases",
    "cases",
    "check",
    "comparisons",
    "detect_host",
    "engine_environment",
    "engine_options",
    "find_checkpoints",
    "host_line",
    "idle",
    "job_for",
    "launch",
    "load_prompts",
    "measure_in_turn",
    "new_phases",
    "new_results",
    "of_workloads",
    "own_us",
    "possible_sides",
    "profiled",
    "provenance",
    "ratio_name",
    "rows",
    "run_child",
    "shapes_folder",
    "shown_phases",
    "sides_of",
    "speed",
    "step",
    "step_ms",
    "steps",
    "stopped",
    "table",
]
