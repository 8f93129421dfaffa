# SPDX-License-Identifier: Apache-2.0
"""Put the plugin's kernels under the names of vLLM's operations, so that vLLM's graphs and fusions stay as they are.

``torch.library`` lets a second kernel stand in front of the one that vLLM's C extension registered for CUDA. The name
in an FX graph, the schema and the shape function stay vLLM's; code that was generated before calls by that name and so
needs no other key in a compile cache. The first kernel is kept, and gets every call that the plugin's refuses.

On CUDA this happens only where the gate says ``on``. On MUSA it is the default where vLLM has no kernel and the
plugin's definition in torch (:mod:`.definitions`) has its place.

One process of vLLM (the one that forks the others) must not start the CUDA runtime, so putting a kernel in front asks
nothing of the device: the kernel is built or loaded at the first call, once. vLLM's profiling run calls the operations
of a model before any graph is captured. A call while a graph is captured never builds; if it comes first, vLLM's kernel
serves it.

The dispatcher reaches the plugin's kernel through a few lines of Python. docs/kernels.md has what they cost.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from .. import gates, journal
from ..errors import HwpluginError
from .operations import GATE, KEY, MUSA_KEY, OPS, RECORD, SKIP, Operation, choose, describe, unknown_names

logger = logging.getLogger("vllm.hwplugin")


# Processes that run no model; importing vLLM's C extension there would only cost their start.
_NO_MODEL = ("api-server", "inspection")


# In csrc/common/stream.h: a kernel that is broken here is not to be passed over.
_NOT_STARTED: Final = "the kernel did not start"


class OverrideError(HwpluginError, RuntimeError):
    """A kernel that was asked for cannot stand under vLLM's name, and the process must not run without it."""


class _Refused(Exception):
    """Why one operation keeps vLLM's kernel."""


@dataclass
class Override:
    """One operation with two kernels.

    Attributes:
        wanted: why the plugin's is wanted.
        required: that it is not to be had is an error.
        stock: what serves without the plugin's kernel: vLLM's, or ``torch`` for the plugin's definition.
        state: ``open`` until the first call for a device.
        reason: why it is as it is.
        library: the registration; the plugin's kernel stands in front as long as this lives.
    """

    op: Operation
    wanted: str
    required: bool
    stock: Literal["vllm", "torch"] = "vllm"
    state: Literal["open", "plugin", "vllm", "torch"] = "open"
    reason: str = ""
    library: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, state: Literal["open", "plugin", "vllm", "torch"], reason: str) -> None:
        self.state, self.reason = state, reason
        journal.note(f"{RECORD}{self.op.name}", describe(state, reason))
        logger.debug("%s: %s", self.op.qualname, describe(state, reason))


_lock = threading.RLock()
_overrides: dict[str, Override] = {}


def install(settings: gates.Settings) -> None:
    """Put the chosen kernels in front, in this process. Calling it again changes nothing.

    Whatever goes wrong, an operation that did not get the plugin's kernel has the one that it had.

    Raises:
        OverrideError: the gate says ``on``, and a kernel cannot be put in front; or it does not say ``off``, strict
            mode is on, and a name in the list of exceptions is unknown.
        GateError: the gate says ``on``, and another variable has a bad value.
    """
    choice, skip = settings.values[GATE].text, settings.values[SKIP].names
    # The defaults promise no kernel: where one cannot be had, what would serve without it does.
    required = choice == "on"
    try:
        settings.require_process()
    except gates.GateError:
        if required:
            raise
        # The patch engine has reported it; the plugin does nothing until it is right.
        return
    if choice == "off":
        return
    if wrong := unknown_names(skip):
        text = f"{SKIP} names {', '.join(wrong)}, which no kernel is for; expected some of {', '.join(OPS)}"
        if required or settings.strict:
            raise OverrideError(text)
        if not journal.repeats_another():
            logger.warning("%s", text)
    if journal.role() in _NO_MODEL:
        return
    try:
        refused = _put_all(choice, skip, required)
    except Exception as error:
        # PyTorch and vLLM's extension fail in ways of their own, and none of them is worth a process.
        text = (
            f"the plugin's kernels cannot stand under the names of vLLM's operations: {type(error).__name__}: {error}"
        )
        if required:
            raise OverrideError(f"{GATE}=on, but {text}. Set {GATE}=off to go on") from error
        logger.exception("%s; what they have serves", text)
        return
    if refused:
        text = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        if required:
            raise OverrideError(
                f"{GATE}=on, but these operations cannot get the plugin's kernel: {text}. Name them in {SKIP} to go on"
            )
        logger.warning("these operations keep the kernels that they have: %s", text)


def _put_all(choice: str, skip: Sequence[str], required: bool) -> dict[str, str]:
    """Put in front what is wanted; why not, of those that it was refused for."""
    musa = is_musa_host()
    if choice == "auto" and not musa:
        return {}
    load_extension()
    refused: dict[str, str] = {}
    with _lock:
        for op in OPS.values():
            wanted = choose(op, choice, skip, defined=_stock(op) == "torch")
            if not wanted.wanted or op.name in _overrides:
                continue
            try:
                put_in_front(op, MUSA_KEY if musa else KEY, wanted.reason, required=required)
            except _Refused as reason:
                refused[op.name] = str(reason)
            except Exception as error:
                # A PyTorch without one of the calls; the other operations may still get their kernels.
                logger.debug("%s cannot get the plugin's kernel", op.qualname, exc_info=True)
                refused[op.name] = f"{type(error).__name__}: {error}"
            if op.name in refused:
                journal.note(f"{RECORD}{op.name}", describe(_stock(op), refused[op.name]))
    return refused


def _stock(op: Operation) -> Literal["vllm", "torch"]:
    from .definitions import is_defined

    return "torch" if is_defined(op.name) else "vllm"


def load_extension() -> None:
    """Import vLLM's C extension: a kernel that is registered later would stand in front of the plugin's."""
    importlib.import_module("vllm._custom_ops")


def put_in_front(op: Operation, key: str, wanted: str, *, required: bool) -> Override:
    """Register the plugin's kernel for one dispatch key of vLLM's operation.

    Args:
        wanted: why, for the journal.
        required: a kernel that is not to be had at the first call is an error.

    Raises:
        _Refused: vLLM's operation is not there, or not as it is known.
    """
    torch: Any = importlib.import_module("torch")
    packet = getattr(getattr(torch.ops, op.namespace), op.name, None)
    if packet is None:
        raise _Refused(f"this vLLM has no operation {op.qualname}")
    theirs = packet.default
    importlib.import_module(f"vllm_hwplugin.ops.{op.name}")
    own = getattr(torch.ops.hwplugin, op.name).default
    if not _alike(own._schema.arguments, theirs._schema.arguments):
        raise _Refused(f"{op.qualname} has a schema that is not known: {theirs._schema}; expected {own._schema}")
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.qualname, key):
        raise _Refused(f"this vLLM has no kernel of {op.qualname} for {key}")
    override = Override(op, wanted, required, _stock(op))
    kernel = _kernel(override, own, theirs, torch.library.get_kernel(op.qualname, key))
    library = torch.library.Library(op.namespace, "IMPL")
    with warnings.catch_warnings():
        # PyTorch warns of what is done here on purpose.
        warnings.filterwarnings("ignore", message=".*[Oo]verrid", category=UserWarning)
        library.impl(op.name, kernel, key, with_keyset=True, allow_override=True)
    override.library = library
    _overrides[op.name] = override
    override.settle("open", "no call for a device so far")
    return override


def _alike(own: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether the plugin's operation can be called as vLLM's is: the same arguments, and after them only defaults."""

    def known(argument: Any) -> tuple[str, str, bool]:
        # vLLM marks a number of merge_attn_states as written, which nothing can be.
        return argument.name, str(argument.type), argument.is_write and "Tensor" in str(argument.type)

    alike = all(known(one) == known(other) for one, other in zip(own, theirs, strict=False))
    return alike and all(one.has_default_value() for one in own[len(theirs) :])


def _kernel(override: Override, own: Any, theirs: Any, stock: Any) -> Callable[..., None]:
    """What the dispatcher calls: the plugin's kernel where it takes the call, else vLLM's."""
    # The dispatcher leaves trailing arguments out that have their default.
    defaults = tuple(argument.default_value for argument in theirs._schema.arguments)
    taken = min(len(own._schema.arguments), len(defaults))
    # What the plugin's operation knows nothing of has to say nothing.
    surplus = defaults[taken:]
    refusal = f"{override.op.name}: "

    def kernel(keyset: Any, *args: Any) -> None:
        if len(args) < len(defaults):
            args += defaults[len(args) :]
        if override.state == "open":
            _decide(override, args)
        if override.state == "plugin" and args[taken:] == surplus:
            try:
                return own(*args[:taken])  # type: ignore[no-any-return]
            except RuntimeError as error:
                # The operation's own checks, which come before anything is launched. What vLLM's kernel does not take
                # either, it reports itself.
                if refusal not in str(error) or _NOT_STARTED in str(error):
                    raise
        return stock.call_boxed(keyset, *args)  # type: ignore[no-any-return]

    return kernel


def _decide(override: Override, args: tuple[Any, ...]) -> None:
    """Settle at the first call which kernel serves this process: load the plugin's, which may run a compiler.

    Raises:
        OverrideError: the kernel is required and cannot be had.
    """
    with override.lock:
        if override.state != "open":
            return
        torch: Any = importlib.import_module("torch")
        device = next(argument.device for argument in args if isinstance(argument, torch.Tensor))
        if is_capturing(device):
            # The next call that is not captured decides. Until then the graph that is being captured has the other.
            override.settle("open", "the first call came while a graph was captured, which does not have it")
            return
        try:
            loaded = load_kernel(override.op)
        except Exception:
            # What a build or a library does beyond its own errors must not end a forward pass that vLLM can do.
            logger.exception("the kernel %s is not used, its loading failed", override.op.name)
            loaded = False
        if loaded:
            override.settle("plugin", override.wanted)
            return
        reason = "the plugin's kernel is not to be had here, the log says why"
        override.settle(override.stock, reason)
        if override.required:
            raise OverrideError(
                f"{override.op.qualname} cannot get the plugin's kernel: {reason}. Name {override.op.name} in {SKIP} "
                "to go on"
            )


def is_capturing(device: Any) -> bool:
    from .compile.jit import GPUS

    torch: Any = importlib.import_module("torch")
    return device.type in GPUS and bool(torch.get_device_module(device).is_current_stream_capturing())


def load_kernel(op: Operation) -> bool:
    """Load the kernel into this process; False where it cannot be had, which the log then explains."""
    from .compile.jit import ensure
    from .compile.spec import KERNELS

    return ensure(KERNELS[op.name])


def is_musa_host() -> bool:
    """Whether torch's one backend from outside is torch_musa's, which asks nothing of a device."""
    torch: Any = importlib.import_module("torch")
    return bool(torch._C._get_privateuse1_backend_name() == "musa")


def states() -> dict[str, str]:
    """What serves each operation that was put in front in this process, in words."""
    return {name: describe(item.state, item.reason) for name, item in _overrides.items()}


def remove() -> None:
    """Give every operation its own kernel back. For tests: not while one of them runs."""
    with _lock:
        for item in _overrides.values():
            item.library._destroy()
        _overrides.clear()


def _renew_locks() -> None:
    # Another thread of the parent may have held them, and it does not exist in the child.
    global _lock
    _lock = threading.RLock()
    for item in _overrides.values():
        item.lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)
