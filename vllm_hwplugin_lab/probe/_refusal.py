# SPDX-License-Identifier: Apache-2.0
"""Which exceptions of a backend are its no, and which are a fault."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from vllm_hwplugin.errors import HwpluginError

#: What vLLM's backends, torch and the kernels say no with. A TypeError, a KeyError or an AttributeError is none of
#: them: it is what a wrong call of this vLLM looks like.
_REFUSALS = (NotImplementedError, ValueError, AssertionError, RuntimeError)


class Refused(HwpluginError):
    """A backend does not take a batch; says why, in its own words on one line."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Around calls of a backend and of nothing else: what it says no with becomes `Refused`.

    Raises:
        Refused: see there.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        # It says nothing about the backend.
        raise
    except _REFUSALS as error:
        raise Refused(one_line(error)) from error
    except Exception as error:
        # Triton's own exceptions derive from none of those: a shape that does not compile or does not fit the device.
        if type(error).__module__.partition(".")[0] != "triton":
            raise
        raise Refused(one_line(error)) from error


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
