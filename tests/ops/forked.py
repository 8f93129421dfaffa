# SPDX-License-Identifier: Apache-2.0
"""A forked process that may never end."""

from __future__ import annotations

import os
import select
import signal
import warnings
from collections.abc import Callable


def said_by_a_fork(say: Callable[[], str], seconds: float) -> str:
    """What ``say`` returns in a forked child, which is killed then; fails where it says nothing in time."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns where there are other threads, and one of them, which holds a lock, is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.write(writer, say().encode())
        finally:
            os._exit(0)
    os.close(writer)
    answered, _, _ = select.select([reader], [], [], seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader) as lines:
        assert answered, f"the child has said nothing for {seconds:g} s"
        return lines.read()
