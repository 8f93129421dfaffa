# SPDX-License-Identifier: Apache-2.0
"""Run vLLM engines in child processes and measure them, for ``demo``, ``bench`` and ``probe``.

A side (unpatched or patched) is a :class:`Job`. ``turns`` runs the jobs of a case in fresh processes and returns an
:class:`Outcome` for each, even if an engine crashed. ``plan`` makes the jobs, ``results`` the results file, and
``table`` the tables. Only the child processes (``_engine``, ``_serving``, ``_server``) import torch and vLLM.

``serve``, ``soak`` and ``micro`` are other kinds of runs: a server's load, a changing load, and single kernels.
"""

from ._checkpoints import DRAFT_TOKENS, Checkpoints, find_checkpoints, load_prompts
from ._host import Host, HostUnknown, detect_host
from ._job import Event, Job, Outcome, Workload, acceptance_length
from ._launch import Ended, TimeLimit, run_child
from ._settings import engine_environment, engine_options
from ._shapes import DRAFT_MODEL, METHODS, NO_DRAFTS, SHAPES
from .plan import ALL_SIDES, Case, Settings, job_for
from .results import provenance, read_results, results_text, rounds_entry
from .turns import launch, measure_in_turn, of_workloads
