# SPDX-License-Identifier: Apache-2.0
"""What a kernel of paged attention is, whichever language it is written in."""

from __future__ import annotations

from typing import ClassVar, Protocol

from ._arguments import Arguments
from ._plan import Heights, LaunchPlan
from ._scratch import Scratch


class Kernel(Protocol):
    """One for a device. It has no memory and no state.

    Attributes:
        name: for logs and tests.
        heights: rows of each tile that it has, and how many programs with it share a multiprocessor.
        multiprocessors: of the device.
    """

    name: ClassVar[str]
    heights: ClassVar[Heights]

    @property
    def multiprocessors(self) -> int: ...

    def check(self, given: Arguments) -> None:
        """Refuse what a plan or a launch would take wrongly, but for what the launch itself refuses.

        Raises:
            ValueError: what, found, expected.
        """

    def launch(self, given: Arguments, plan: LaunchPlan, scratch: Scratch) -> None:
        """Run one batch.

        Raises:
            RuntimeError: the CUDA operation has refused an argument.
        """
