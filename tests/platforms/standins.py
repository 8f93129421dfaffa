# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the three packages that a Moore Threads host has, and no test host does.

Nothing here was recorded on MUSA hardware. Each shape comes from what is published:

- ``pymtml``: mthreads-ml-py 2.4.3 (its one module, read). The functions that are here have its names and parameters;
  a call outside ``mtmlLibraryInit``/``mtmlLibraryShutDown`` raises ``MTMLError``, which has a code for it (666,
  "Uninitialized"); and so does a second ``mtmlLibraryInit``, as 2.2 (read) keeps one handle and cannot start twice;
  ``sbdf`` is a ctypes char array there, so bytes here; ``mtmlMemoryContext`` is a context manager.
- ``torchada``: 0.1.103 (read): ``is_musa_platform``, ``get_device_name``, ``__version__``; importing it replaces
  ``torch.cuda`` by a module whose attributes are ``torch.musa``'s, except ``is_available``, which stays torch's own.
- ``torch_musa``: by PyTorch's documentation of PrivateUse1 backends (a device module ``torch.<name>`` with
  ``set_device``, ``device_count``, ``get_device_properties``, memory statistics like ``torch.cuda``'s), by the names
  that torchada 0.1.103 uses of it, and by its backend ``mccl``, which ``torch.distributed.Backend.register_backend``
  (documented) makes known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: str
    uuid: str
    sbdf: bytes
    memory: int


GPUS = (
    Gpu("MTT S5000", "uuid-0", b"0000:3b:00.0", 80 << 30),
    Gpu("MTT S5000", "uuid-1", b"0000:5e:00.0", 80 << 30),
    Gpu("MTT S4000", "uuid-2", b"0000:86:00.0", 48 << 30),
)


def pymtml(gpus: Sequence[Gpu] = GPUS, *, broken: Exception | None = None) -> ModuleType:
    """The module on a host with these GPUs; ``broken`` is what its initialisation raises."""
    module = ModuleType("pymtml")
    module.open, module.started = 0, False  # type: ignore[attr-defined]

    class MTMLError(Exception):
        pass

    def initialised() -> None:
        if not module.open:
            raise MTMLError("Uninitialized")

    def mtmlLibraryInit() -> None:
        if broken is not None:
            raise broken
        if module.started:
            raise MTMLError("Already Initialized")
        module.started = True
        module.open += 1

    def mtmlLibraryShutDown() -> None:
        initialised()
        module.open -= 1

    def mtmlLibraryCountDevice() -> int:
        initialised()
        return len(gpus)

    def mtmlLibraryInitDeviceByIndex(index: int) -> Gpu:
        initialised()
        if not 0 <= index < len(gpus):
            raise MTMLError("Not Found")
        return gpus[index]

    def mtmlDeviceGetName(device: Gpu) -> str:
        initialised()
        return device.name

    def mtmlDeviceGetUUID(device: Gpu) -> str:
        initialised()
        return device.uuid

    def mtmlDeviceGetPciInfo(device: Gpu) -> Any:
        initialised()
        return SimpleNamespace(sbdf=device.sbdf)

    @contextmanager
    def mtmlMemoryContext(device: Gpu) -> Iterator[Gpu]:
        initialised()
        yield device

    def mtmlMemoryGetTotal(memory: Gpu) -> int:
        initialised()
        return memory.memory

    vars(module).update({name: value for name, value in locals().items() if name.startswith(("mtml", "MTML"))})
    return module


def musa(calls: list[tuple[Any, ...]]) -> ModuleType:
    """``torch.musa`` with 4096 bytes in use on each device, after more; notes what is asked about a device."""
    module = ModuleType("torch.musa")
    peaks: dict[str, int] = {}
    cached = [512]

    def noting(name: str, answer: Any = None) -> Any:
        def call(*args: Any) -> Any:
            calls.append((name, *args))
            return answer

        return call

    module.set_device = lambda device: setattr(module, "current", device)  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: setattr(module, "seed", seed)  # type: ignore[attr-defined]
    module.empty_cache = lambda: cached.__setitem__(0, 0)  # type: ignore[attr-defined]
    module.reset_peak_memory_stats = (  # type: ignore[attr-defined]
        lambda device: peaks.__setitem__(device, 4096 + cached[0])
    )
    module.max_memory_allocated = lambda device: peaks.get(device, 1 << 20)  # type: ignore[attr-defined]
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.get_device_capability = noting("get_device_capability", (3, 1))  # type: ignore[attr-defined]
    module.get_device_properties = noting(  # type: ignore[attr-defined]
        "get_device_properties", SimpleNamespace(multi_processor_count=56)
    )
    return module


def torchada(platform: str = "musa") -> ModuleType:
    module = ModuleType("torchada")
    module.__version__ = "0.1.103"  # type: ignore[attr-defined]
    module.is_musa_platform = lambda: platform == "musa"  # type: ignore[attr-defined]
    module.get_device_name = lambda: platform  # type: ignore[attr-defined]
    return module
