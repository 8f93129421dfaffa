# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls in each of its processes.

vLLM only logs an error that is raised while a plugin is *imported*, and goes on without the plugin. So this module
imports nothing at its top, and everything that can fail happens in the function, whose errors do reach the user.
"""


def register() -> None:
    """Put the patches into force (entry point ``hwplugin`` of the group ``vllm.general_plugins``).

    Raises:
        PatchingError, GateError: only in strict mode (``VLLM_HWPLUGIN_STRICT=1``) or for a feature whose gate says
            ``on``; otherwise an error is logged and vLLM runs stock.
    """
    import logging
    import sys

    from . import gates

    try:
        if not gates.read("VLLM_HWPLUGIN").flag:
            # Most of the cost of a start is importing the engine; a plugin that is switched off need not pay it.
            logging.getLogger("vllm.hwplugin").info("vllm-hwplugin is switched off (VLLM_HWPLUGIN); vLLM runs stock")
            if (envs := sys.modules.get("vllm.envs")) is not None:
                # vLLM calls every VLLM_ variable that it does not know a mistake, the one that switches this off too.
                gates.register_with_vllm(envs)
            return
    except gates.GateError:
        # The engine reports a bad value, or raises it: it knows what the other gates ask for.
        pass

    from .patching import _runtime

    _runtime.install()
