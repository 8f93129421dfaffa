# SPDX-License-Identifier: Apache-2.0
"""Put the plugin's kernels under the names of vLLM's operations, so that vLLM's graphs and fusions stay as they are.

``torch.library`` lets a second kernel stand in front of the one that vLLM's C extension registered for CUDA. The name
in an FX graph, the schema and the shape function stay vLLM's; code that was generated before calls by that name and so
needs no other key in a compile cache. The first kernel is kept, and gets every call that the plugin's cannot serve.

One process of vLLM (the one that forks the others) must not start the CUDA runtime, so putting a kernel in front asks
nothing of the device. By default this happens only if the driver names a GPU on which the kernel gains over this
vLLM's. The first call's tensor names the device itself: the kernel is then built or loaded, once. vLLM's profiling run
calls the operations of a model before any graph is captured. A call while a graph is captured never builds; if it comes
first, vLLM's kernel serves it.

On MUSA the same is done for the key of its device. Where vLLM has no kernel to keep, the plugin's definition in torch
(:mod:`.definitions`) has its place.

The dispatcher reaches the plugin's kernel through a few lines of Python. docs/kernels.md has what they cost.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from .. import gates, journal
from ..errors import HwpluginError
from .definitions import MUSA_KEY, is_defined
from .override_table import GATE, KEY, NO_GPU, OPS, RECORD, SKIP, OverridableOp, choose, describe, unknown_names

logger = logging.getLogger("vllm.hwplugin")


# Processes that run no model; importing vLLM's C extension there would only cost their start.
_NO_MODEL = ("api-server", "inspection")


class OverrideError(HwpluginError, RuntimeError):
    """A kernel that was asked for cannot stand under vLLM's name, and the process must not run without it."""


class _Refused(Exception):
    """Why one operation keeps vLLM's kernel."""


@dataclass
class Override:
    """One operation with two kernels.

    Attributes:
        stock: what serves without the plugin's kernel: vLLM's, or ``torch`` for the plugin's definition.
        state: ``open`` until the first call for a device.
        reason: why it is as it is.
        library: the registration; the plugin's kernel stands in front as long as this lives.
    """

    op: OverridableOp
    choice: str
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


def install(environ: Mapping[str, str] | None = None) -> None:
    """Put the chosen kernels in front, in this process. Calling it again changes nothing.

    Whatever goes wrong, an operation that did not get the plugin's kernel has vLLM's own.

    Raises:
        OverrideError: the gate says ``on``, or strict mode is on, and a chosen kernel cannot be put in front.
        GateError: the gate says ``on``, and another variable has a bad value.
    """
    environ = os.environ if environ is None else environ
    try:
        values = gates.read_all(environ)
    except gates.GateError:
        if _asked_for(environ):
            raise
        # The patch engine has reported it; the plugin does nothing until it is right.
        return
    choice = values[GATE].text
    required = choice == "on" or values[gates.STRICT].flag
    try:
        _install(choice, values[SKIP].names, required)
    except OverrideError:
        raise
    except Exception as error:
        # PyTorch, vLLM's extension and NVML fail in ways of their own, and none of them is worth a process.
        text = (
            f"the plugin's kernels cannot stand under the names of vLLM's operations: {type(error).__name__}: {error}"
        )
        for op in OPS.values():
            if op.name in _overrides or is_defined(op.name):
                continue
            if choose(op, choice, values[SKIP].names, None, None).wanted:
                journal.note(f"{RECORD}{op.name}", describe("vllm", text))
        if required:
            raise OverrideError(f"{_demand(choice)}, but {text}. Set {GATE}=off to go on") from error
        logger.exception("%s; vLLM's own serve", text)


def _asked_for(environ: Mapping[str, str]) -> bool:
    try:
        return gates.read(GATE, environ).text == "on"
    except gates.GateError:
        return False


def _demand(choice: str) -> str:
    return f"{GATE}=on" if choice == "on" else f"{gates.STRICT}=1"


def _install(choice: str, skip: Sequence[str], required: bool) -> None:
    if choice != "off" and (wrong := unknown_names(skip)):
        text = f"{SKIP} names {', '.join(wrong)}, which no kernel is for; expected some of {', '.join(OPS)}"
        if required:
            raise OverrideError(text)
        logger.warning("%s", text)
    chosen = [op for op in OPS.values() if choose(op, choice, skip, None, None, defined=True).wanted]
    if not chosen or journal.role() in _NO_MODEL:
        return
    if is_musa_host():
        # The defaults promise no kernel there: where one cannot be had, what would serve without it does.
        key, required = MUSA_KEY, choice == "on"
        chosen = _chosen_on_musa(chosen, choice)
    else:
        key = KEY
        chosen = [op for op in chosen if choose(op, choice, skip, None, None).wanted]
        if choice == "auto":
            chosen = _gaining_here(chosen)
    if not chosen:
        return
    with _lock:
        refused = {}
        load_extension()
        for op in chosen:
            if op.name in _overrides:
                continue
            try:
                _overrides[op.name] = put_in_front(op, key, choice, required=required)
            except _Refused as reason:
                refused[op.name] = str(reason)
            except Exception as error:
                # A PyTorch without one of the calls above; the other operations may still get their kernels.
                logger.debug("%s cannot get the plugin's kernel", op.qualname, exc_info=True)
                refused[op.name] = f"{type(error).__name__}: {error}"
            if op.name in refused:
                journal.note(f"{RECORD}{op.name}", describe(_stock(op), refused[op.name]))
    if refused:
        text = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        if required:
            raise OverrideError(
                f"{_demand(choice)}, but these operations cannot get the plugin's kernel: {text}. "
                f"Name them in {SKIP} to go on"
            )
        logger.warning("these operations keep the kernels that they have: %s", text)


def _chosen_on_musa(ops: Sequence[OverridableOp], choice: str) -> list[OverridableOp]:
    """Those that ``auto`` takes on MUSA: where vLLM has a kernel of its own, nothing says that the plugin's gains."""
    load_extension()
    if choice != "auto":
        return list(ops)
    for op in ops:
        if not is_defined(op.name):
            journal.note(f"{RECORD}{op.name}", describe("vllm", choose(op, choice, (), "musa", None).reason))
    return [op for op in ops if is_defined(op.name)]


def _stock(op: OverridableOp) -> Literal["vllm", "torch"]:
    return "torch" if is_defined(op.name) else "vllm"


def _gaining_here(ops: Sequence[OverridableOp]) -> list[OverridableOp]:
    """Those that gain on a GPU of this host over the kernel of this vLLM; the others keep that, with nothing in front.

    The defaults say nothing of a host without CUDA, so nothing can be missing there.
    """
    cuda = is_cuda_host()
    names = gpu_names() if cuda else None
    version = vllm_version()
    kept = []
    for op in ops:
        if not cuda:
            journal.note(f"{RECORD}{op.name}", describe("vllm", NO_GPU))
        elif any(choose(op, "auto", (), name, version).wanted for name in names or (None,)):
            kept.append(op)
        else:
            reason = choose(op, "auto", (), " and ".join(sorted(names)) if names else None, version).reason
            journal.note(f"{RECORD}{op.name}", describe("vllm", reason))
    return kept


def load_extension() -> None:
    """Import vLLM's C extension: a kernel that is registered later would stand in front of the plugin's."""
    importlib.import_module("vllm._custom_ops")


def put_in_front(op: OverridableOp, key: str, choice: str, *, required: bool) -> Override:
    """Register the plugin's kernel for one dispatch key of vLLM's operation.

    Args:
        choice: what the gate says, for the decision at the first call.
        required: a kernel that is not to be had is an error.

    Raises:
        _Refused: vLLM's operation is not there, or not as it is known.
    """
    torch: Any = importlib.import_module("torch")
    theirs = _overload(torch, op.namespace, op.name)
    if theirs is None:
        raise _Refused(f"this vLLM has no operation {op.qualname}")
    found = str(theirs._schema)
    if found not in [str(torch._C.parse_schema(f"{op.namespace}::{schema.text}")) for schema in op.schemas]:
        raise _Refused(f"{op.qualname} has a schema that is not known: {found}")
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.qualname, key):
        raise _Refused(f"this vLLM has no kernel of {op.qualname} for {key}")
    own = _own_overload(torch, op, theirs)
    override = Override(op, choice, required, _stock(op))
    kernel = _kernel(override, own, theirs, torch.library.get_kernel(op.qualname, key))
    library = torch.library.Library(op.namespace, "IMPL")
    with warnings.catch_warnings():
        # PyTorch warns of what is done here on purpose.
        warnings.filterwarnings("ignore", message=".*[Oo]verrid", category=UserWarning)
        library.impl(op.name, kernel, key, with_keyset=True, allow_override=True)
    override.library = library
    override.settle("open", "no call for a device so far")
    return override


def _kernel(override: Override, own: Any, theirs: Any, stock: Any) -> Callable[..., None]:
    """What the dispatcher calls: the plugin's kernel where it can serve the call, else vLLM's."""
    predicates = importlib.import_module("vllm_hwplugin.ops._override_support")
    parameters = own._schema.arguments
    supports: Callable[[tuple[Any, ...]], bool] = predicates.predicate(
        override.op.name, [parameter.name for parameter in parameters]
    )
    # The dispatcher leaves trailing arguments out that have their default.
    defaults = tuple(argument.default_value for argument in theirs._schema.arguments)
    taken = min(len(parameters), len(defaults))
    # What the plugin's operation knows nothing of has to say nothing; what it knows alone says so.
    surplus, lacking = defaults[taken:], tuple(parameter.default_value for parameter in parameters[taken:])

    def kernel(keyset: Any, *args: Any) -> None:
        if len(args) < len(defaults):
            args += defaults[len(args) :]
        if override.state == "open":
            _decide(override, args)
        if override.state == "plugin" and args[taken:] == surplus and supports(args[:taken] + lacking):
            own(*args[:taken])
        else:
            stock.call_boxed(keyset, *args)

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
        name = device_name(device)
        choice = choose(override.op, override.choice, (), name, vllm_version(), defined=override.stock == "torch")
        if not choice.wanted:
            override.settle(override.stock, choice.reason)
            return
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
            override.settle("plugin", f"{choice.reason}; {name}")
            return
        reason = "the plugin's kernel is not to be had here, the log says why"
        override.settle(override.stock, reason)
        if override.required:
            raise OverrideError(
                f"{override.op.qualname} cannot get the plugin's kernel: {reason}. Name {override.op.name} in {SKIP} "
                "to go on"
            )


def device_name(device: Any) -> str:
    """The name of a GPU as the table has it."""
    from .compile.jit import GPUS

    torch: Any = importlib.import_module("torch")
    gpu = device.type in GPUS
    return str(torch.get_device_module(device).get_device_name(device)) if gpu else str(device.type)


def is_capturing(device: Any) -> bool:
    from .compile.jit import GPUS

    torch: Any = importlib.import_module("torch")
    return device.type in GPUS and bool(torch.get_device_module(device).is_current_stream_capturing())


def load_kernel(op: OverridableOp) -> bool:
    """Load the kernel into this process; False where it cannot be had, which the log then explains."""
    from .compile.jit import ensure
    from .compile.spec import KERNELS

    return ensure(KERNELS[op.name])


def states() -> dict[str, str]:
    """What serves each operation that was put in front in this process, in words."""
    return {name: describe(item.state, item.reason) for name, item in _overrides.items()}


def remove() -> None:
    """Give every operation its own kernel back. For tests: not while one of them runs."""
    with _lock:
        for item in _overrides.values():
            item.library._destroy()
        _overrides.clear()


def _overload(torch: Any, namespace: str, name: str) -> Any:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return None if packet is None else packet.default


def _own_overload(torch: Any, op: OverridableOp, theirs: Any) -> Any:
    """The plugin's operation, whose arguments have to be vLLM's: as many as both have, the others with a default."""
    from .compile.spec import KERNELS

    if op.name not in KERNELS:
        raise _Refused("this release of vllm-hwplugin has no kernel of it")
    importlib.import_module(f"vllm_hwplugin.ops.{op.name}")
    own = _overload(torch, "hwplugin", op.name)
    arguments, wanted = own._schema.arguments, theirs._schema.arguments
    alike = all(str(one.type) == str(other.type) for one, other in zip(arguments, wanted, strict=False))
    if not alike or not all(one.has_default_value() for one in arguments[len(wanted) :]):
        raise _Refused(f"the plugin's operation has other arguments: {own._schema}")
    return own


def _renew_locks() -> None:
    # Another thread of the parent may have held them, and it does not exist in the child.
    global _lock
    _lock = threading.RLock()
    for item in _overrides.values():
        item.lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


# Part of every supported vLLM. A `pynvml` outside it may be another distribution's, with other functions.
_BINDING: Final = "vllm.third_party.pynvml"


def is_cuda_host() -> bool:
    """Whether this PyTorch is a CUDA build, which asks nothing of a device."""
    return importlib.import_module("torch").version.cuda is not None


def is_musa_host() -> bool:
    """Whether torch's one backend from outside is torch_musa's, which also asks nothing of a device."""
    torch: Any = importlib.import_module("torch")
    return bool(torch._C._get_privateuse1_backend_name() == "musa")


def vllm_version() -> str | None:
    """Of the vLLM of this process, which is imported already where it has loaded the plugin; None without one."""
    try:
        return getattr(importlib.import_module("vllm"), "__version__", None)
    except ImportError:
        return None


def gpu_names() -> frozenset[str] | None:
    """The names of all GPUs that the driver shows, as PyTorch has them.

    CUDA_VISIBLE_DEVICES is not applied: vLLM and Ray set it for a process, or narrow it, after its parent has loaded
    plugins, and a forked child keeps what its parent registered. So some GPUs here are never used by this process. One
    that it uses is missing only if PyTorch has another name for it than NVML: that of a MIG slice ends with its
    profile.

    Returns:
        None where NVML does not answer, as on Jetson and parts of WSL, or counts no GPU.
    """
    try:
        nvml: Any = importlib.import_module(_BINDING)
    except ImportError as error:
        logger.debug("the GPUs have no names before the first call: %s", error)
        return None
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return frozenset(str(nvml.nvmlDeviceGetName(handle)) for handle in handles) or None
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        logger.debug("the GPUs have no names before the first call, because NVML says: %s", error)
        return None
