# SPDX-License-Identifier: Apache-2.0
"""Tell a backend's refusals from errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from vllm_hwplugin.base.errors import HwpluginError

from ._session import one_line

#: Exceptions with which vLLM's backends, torch and kernels refuse. A TypeError, KeyError or AttributeError is not a
#: refusal: a wrong call of this vLLM raises them.
_REFUSALS = (NotImplementedError, ValueError, AssertionError, RuntimeError)


class Refused(HwpluginError):
    """A backend refuses a batch; has its message on one line."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Convert a backend's refusals to `Refused`; wrap only calls of the backend.

    Raises:
        Refused: The backend refuses.
    """
    try:
        yield
    except Exception as error:
        # Triton's errors have other base classes: a shape that does not compile or does not fit the device.
        refused = isinstance(error, _REFUSALS) or type(error).__module__.partition(".")[0] == "triton"
        # Out of memory tells nothing about the backend.
        if not refused or isinstance(error, torch.OutOfMemoryError):
            raise
        raise Refused(one_line(error)) from error
