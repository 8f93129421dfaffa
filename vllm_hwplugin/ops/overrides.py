# SPDX-License-Identifier: Apache-2.0
"""Register the plugin's kernels under the names of vLLM's operations, so that vLLM's graphs and fusions do not change.

``torch.library`` lets a second kernel replace the kernel that vLLM's C extension registered for CUDA. The name in an FX
graph, the schema and the shape function stay vLLM's; generated code calls by that name and needs no other compile cache
key. vLLM's kernel is kept, and gets every call that the plugin's refuses.

On CUDA this happens only if the switch says ``on``. On MUSA it is the default if vLLM has no kernel and the plugin's
PyTorch definition (:mod:`.definitions`) runs.

The process of vLLM that forks the others must not start the CUDA runtime, so the registration does not touch the
device: the first call builds or loads the kernel, once. vLLM's profiling run calls a model's operations before any
graph is captured. A call during a capture never builds; if it comes first, vLLM's kernel runs.

The dispatcher reaches the plugin's kernel through a few lines of Python. docs/kernels.md has their cost.
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

from ..base import gates, run_records
from ..base.errors import HwpluginError
from .operations import GATE, KEY, MUSA_KEY, OPS, RECORD, SKIP, Operation, choose, describe, unknown_names

logger = logging.getLogger("vllm.hwplugin")


# Processes that run no model; importing vLLM's C extension there would only cost their start.
_NO_MODEL = ("api-server", "inspection")


# From csrc/common/stream.h. Such an error is raised, because the kernel is broken here.
_NOT_STARTED: Final = "the kernel did not start"


class OverrideError(HwpluginError, RuntimeError):
    """A demanded kernel cannot replace vLLM's, so the process must not run."""


class _Refused(Exception):
    """Why one operation keeps vLLM's kernel."""


@dataclass
class Override:
    """One operation with two kernels.

    Attributes:
        wanted: why the plugin's is wanted.
        required: its absence is an error.
        stock: runs without the plugin's kernel: vLLM's, or ``torch`` for the plugin's definition.
        state: ``open`` until the first call for a device.
        library: the registration; the plugin's kernel is registered as long as this lives.
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
        run_records.note(f"{RECORD}{self.op.name}", describe(state, reason))
        logger.debug("%s: %s", self.op.qualname, describe(state, reason))


_lock = threading.RLock()
_overrides: dict[str, Override] = {}


def install(settings: gates.Settings) -> None:
    """Register the chosen kernels in this process; idempotent.

    An operation that does not get the plugin's kernel keeps its own.

    Raises:
        OverrideError: the switch says ``on``, and a kernel cannot be registered; or it does not say ``off``, strict
            mode is on, and a name in the list of exceptions is unknown.
        GateError: the switch says ``on``, and another variable has a bad value.
    """
    # The patch engine has reported a bad value.
    choice = "off" if GATE in settings.errors else settings.values[GATE].text
    skip = settings.values[SKIP].names
    # The defaults promise no kernel: operations without it run as they would without the plugin.
    required = choice == "on"
    try:
        settings.require_process()
    except gates.GateError:
        if required:
            raise
        # The patch engine has reported it; the plugin stays disabled until it is fixed.
        return
    if choice == "off":
        return
    if wrong := unknown_names(skip):
        text = f"{SKIP} names {', '.join(wrong)}, without a kernel; expected some of {', '.join(OPS)}"
        if required or settings.strict:
            raise OverrideError(text)
        if not run_records.repeats_another():
            logger.warning("%s", text)
    if run_records.role() in _NO_MODEL:
        return
    try:
        refused = _put_all(choice, skip, required)
    except Exception as error:
        # PyTorch and vLLM's extension fail in many ways, and no failure may end a process here.
        text = f"the plugin's kernels cannot replace the kernels of vLLM's operations: {type(error).__name__}: {error}"
        if required:
            raise OverrideError(f"{GATE}=on, but {text}. Set {GATE}=off to continue") from error
        logger.exception("%s; vLLM's kernels run", text)
        return
    if refused:
        text = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        if required:
            raise OverrideError(
                f"{GATE}=on, but these operations cannot get the plugin's kernel: {text}. Name them in {SKIP} to "
                "continue"
            )
        logger.warning("these operations keep their kernels: %s", text)


def _put_all(choice: str, skip: Sequence[str], required: bool) -> dict[str, str]:
    """Register all wanted kernels; return why others were refused."""
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
                # This PyTorch lacks a call; other operations may still get their kernels.
                logger.debug("%s cannot get the plugin's kernel", op.qualname, exc_info=True)
                refused[op.name] = f"{type(error).__name__}: {error}"
            if op.name in refused:
                run_records.note(f"{RECORD}{op.name}", describe(_stock(op), refused[op.name]))
    return refused


def _stock(op: Operation) -> Literal["vllm", "torch"]:
    from .definitions import is_defined

    return "torch" if is_defined(op.name) else "vllm"


def load_extension() -> None:
    """Import vLLM's C extension, whose kernels would replace earlier ones."""
    importlib.import_module("vllm._custom_ops")


def put_in_front(op: Operation, key: str, wanted: str, *, required: bool) -> Override:
    """Register the plugin's kernel for one dispatch key of vLLM's operation.

    Args:
        wanted: why, for the run record.
        required: an error at the first call if the kernel cannot be loaded.
    """
    torch: Any = importlib.import_module("torch")
    packet = getattr(getattr(torch.ops, op.namespace), op.name, None)
    if packet is None:
        raise _Refused(f"this vLLM has no operation {op.qualname}")
    theirs = packet.default
    importlib.import_module(f"vllm_hwplugin.ops.{op.name}")
    own = getattr(torch.ops.hwplugin, op.name).default
    if not _alike(own._schema.arguments, theirs._schema.arguments):
        raise _Refused(f"{op.qualname} has an unknown schema: {theirs._schema}; expected {own._schema}")
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.qualname, key):
        raise _Refused(f"this vLLM has no kernel of {op.qualname} for {key}")
    override = Override(op, wanted, required, _stock(op))
    kernel = _kernel(override, own, theirs, torch.library.get_kernel(op.qualname, key))
    library = torch.library.Library(op.namespace, "IMPL")
    with warnings.catch_warnings():
        # PyTorch warns about overriding a kernel, which is intended here.
        warnings.filterwarnings("ignore", message=".*[Oo]verrid", category=UserWarning)
        library.impl(op.name, kernel, key, with_keyset=True, allow_override=True)
    override.library = library
    _overrides[op.name] = override
    override.settle("open", "no call for a device so far")
    return override


def _alike(own: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether the plugin's operation accepts vLLM's calls."""

    def known(argument: Any) -> tuple[str, str, bool]:
        # vLLM marks a number of merge_attn_states as written, though numbers cannot be.
        return argument.name, str(argument.type), argument.is_write and "Tensor" in str(argument.type)

    alike = all(known(argument) == known(other) for argument, other in zip(own, theirs, strict=False))
    return alike and all(argument.has_default_value() for argument in own[len(theirs) :])


def _kernel(override: Override, own: Any, theirs: Any, stock: Any) -> Callable[..., None]:
    """Return what the dispatcher calls: the plugin's kernel, else vLLM's."""
    # The dispatcher omits trailing arguments that have their default.
    defaults = tuple(argument.default_value for argument in theirs._schema.arguments)
    taken = min(len(own._schema.arguments), len(defaults))
    # Arguments that the plugin's operation lacks must have their defaults.
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
                # The operation's checks come before any launch, so vLLM's kernel can run, or report the error itself.
                if refusal not in str(error) or _NOT_STARTED in str(error):
                    raise
        return stock.call_boxed(keyset, *args)  # type: ignore[no-any-return]

    return kernel


def _decide(override: Override, args: tuple[Any, ...]) -> None:
    """Decide at the first call which kernel runs; may compile the plugin's."""
    with override.lock:
        if override.state != "open":
            return
        torch: Any = importlib.import_module("torch")
        device = next(argument.device for argument in args if isinstance(argument, torch.Tensor))
        if is_capturing(device):
            # The next call outside a capture decides. The graph captured now has vLLM's kernel.
            override.settle("open", "the first call came during the capture of a graph, which has vLLM's kernel")
            return
        try:
            loaded = load_kernel(override.op)
        except Exception:
            # An unexpected error of a build or a library must not end a forward pass that vLLM can run.
            logger.exception("the kernel %s is not used, because loading it failed", override.op.name)
            loaded = False
        if loaded:
            override.settle("plugin", override.wanted)
            return
        reason = "the plugin's kernel cannot be loaded here, the log says why"
        override.settle(override.stock, reason)
        if override.required:
            raise OverrideError(
                f"{override.op.qualname} cannot get the plugin's kernel: {reason}. Name {override.op.name} in {SKIP} "
                "to continue"
            )


def is_capturing(device: Any) -> bool:
    from .compile.jit import GPUS

    torch: Any = importlib.import_module("torch")
    return device.type in GPUS and bool(torch.get_device_module(device).is_current_stream_capturing())


def load_kernel(op: Operation) -> bool:
    """Load the kernel into this process; False, with a warning, if impossible."""
    from .compile.jit import ensure
    from .compile.spec import KERNELS

    return ensure(KERNELS[op.name])


def is_musa_host() -> bool:
    """Whether torch's external backend is torch_musa; does not touch a device."""
    torch: Any = importlib.import_module("torch")
    return bool(torch._C._get_privateuse1_backend_name() == "musa")


def remove() -> None:
    with _lock:
        for override in _overrides.values():
            override.library._destroy()
        _overrides.clear()


def _renew_locks() -> None:
    # A thread of the parent may have held them, and it does not exist in the child.
    global _lock
    _lock = threading.RLock()
    for override in _overrides.values():
        override.lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)
