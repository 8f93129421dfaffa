# SPDX-License-Identifier: Apache-2.0
"""What is done for DFlash when its configuration is there.

vLLM calls a platform when everything in `VllmConfig.__post_init__` is decided. It does so for each configuration, also
for those made by `dataclasses.replace` and for the draft's own, in the parent and in workers. Where the platform is
another's, the drafter of the V1 runner calls first, before weights are loaded.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_hwplugin import gates, journal, patching
from vllm_hwplugin.features import DFLASH_FULL_GRAPH, gate_of
from vllm_hwplugin.spec_decode import dflash_config
from vllm_hwplugin.spec_decode.dflash_config import DFlashConfigError

logger = logging.getLogger("vllm.hwplugin")

_CHECK = "dflash-config"
_GATE = gate_of(DFLASH_FULL_GRAPH)
# DFlash's proposer is a subclass of the one that the drafter features patch, and shares the runner's code with it.
_FAMILIES = ("dflash-", "draft-")


def check_and_update_config(vllm_config: Any) -> None:
    """Check a DFlash configuration, and see that DFlash's patches are in force.

    For `check_and_update_config` of a platform, after its base class has decided the cudagraph mode, and for the
    patched `DFlashProposer`. Configurations without DFlash are left alone.

    Args:
        vllm_config: the `VllmConfig` that is being made.

    Raises:
        DFlashConfigError: draft, target and settings do not fit together.
        InstallError: a patched module was imported too early to be patched in place, and its features would be half
            in force; or a whole feature is lost that way, or the plugin failed through a fault in it, which a gate at
            `on` or strict mode does not allow.
    """
    spec = vllm_config.speculative_config
    if spec is None or not spec.use_dflash():
        return
    entry = patching.install()
    try:
        dflash_config.check(vllm_config)
    except DFlashConfigError:
        raise
    except Exception as error:
        # What vLLM may well be able to serve.
        if _must_hold():
            raise patching.InstallError(
                f"a fault in vllm-hwplugin at {_CHECK}, which strict mode or {_GATE}=on does not let pass: "
                f"{type(error).__name__}: {error}; set {_GATE}=auto and no strict mode to go on, and report it"
            ) from error
        logger.exception("DFlash: %s is left to vLLM, because the plugin failed", _CHECK)
        journal.note(_CHECK, f"left to vLLM: {type(error).__name__}: {error}")
    # Normally all of them run patched: vLLM loads the plugin before it imports what the patches touch.
    patching.force([name for name in entry.live if name.startswith(_FAMILIES)])


def _must_hold() -> bool:
    try:
        return gates.read(gates.STRICT).flag or gates.demands(_GATE)
    except gates.GateError:
        # Reported when the patches were to be put in force, and an error then if strictness was asked for.
        return False
