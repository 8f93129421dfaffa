# SPDX-License-Identifier: Apache-2.0
"""The two entry points that vLLM calls in each of its processes.

vLLM only logs an error that is raised while a plugin is *imported*, and goes on without the plugin. So this module
imports nothing at its top, and everything that can fail happens in the functions. Errors of the general function do
reach the user; errors of the platform function do not, so it raises none.
"""


def platform() -> str | None:
    """Return a platform class's name, or None to leave it to vLLM.

    vLLM calls it, as entry point ``hwplugin`` of the group ``vllm.platform_plugins``, while vLLM is being imported. So
    it imports neither vLLM nor torch nor the patch engine.
    """
    try:
        from .base import log
        from .platforms import offer

        log.prepare()
        return offer()
    except Exception:
        import logging

        # vLLM drops the error, in most versions without a word; the log is the only way to say it.
        logging.getLogger("vllm.hwplugin").exception("no platform class is offered, because the plugin failed")
        return None


def register() -> None:
    """Apply the patches and register the kernels.

    vLLM calls it as entry point ``hwplugin`` of the group ``vllm.general_plugins``.

    Raises:
        PatchingError, GateError, OverrideError, PlatformError: only in strict mode (``VLLM_HWPLUGIN_STRICT=1``), for a
            feature whose switch is ``on``, or where half a feature would run. Otherwise the error is logged and vLLM
            runs unpatched (docs/failures.md).
    """
    import sys

    from . import __version__
    from .base import gates, log, run_records

    log.prepare()
    settings = gates.Settings()
    if not settings.switched_on:
        # Most of the cost of a start is importing the engine; a plugin that is switched off need not pay it.
        if (envs := sys.modules.get("vllm.envs")) is not None:
            # vLLM calls every VLLM_ variable that it does not know a mistake, the one that switches this off too.
            gates.register_with_vllm(envs)
        run_records.begin_off(__version__)
        return

    from . import patching, platforms
    from .ops import overrides

    patching.install(settings)
    _hand_on_whole_steps()
    overrides.install(settings)
    platforms.note_used()
    platforms.must_hold(settings)


def _hand_on_whole_steps() -> None:
    """Let an API server that is behind write longer responses.

    vLLM handles 128 outputs of a step, lets their responses be written, and handles the next 128. With more requests
    each response therefore has the tokens of one step, however many steps the server is behind.
    """
    import logging
    import os

    from .base import run_records

    if (entry := run_records.current()) is None or not entry.live:
        return
    # More than a step has. Child processes inherit it.
    name, all_outputs = "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "65536"
    if name not in os.environ:
        os.environ[name] = all_outputs
        meaning = f"{all_outputs} (vLLM's default: 128): an API server that is behind writes fewer, longer responses"
        run_records.note(name, meaning)
        logging.getLogger("vllm.hwplugin").info("%s=%s", name, meaning)
