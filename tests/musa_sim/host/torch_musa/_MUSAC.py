# SPDX-License-Identifier: Apache-2.0
"""The compiled part. The tests build it before a process may import torch_musa (``tests/musa_sim/host.py``)."""

import importlib.util
import os
import sys
from pathlib import Path

_path = os.environ.get("MUSA_SIM_LIBRARY")
if _path is None:
    raise ImportError("MUSA_SIM_LIBRARY is not set: start the process with the environment of tests/musa_sim/host.py")
_spec = importlib.util.spec_from_file_location("musa_sim_device", _path)
device = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(device)
sys.modules["musa_sim_device"] = device
# As torch_musa 2.7.1's musa_functions.yaml names them.
device.know(Path(__file__).with_name("operations.txt").read_text().split())
