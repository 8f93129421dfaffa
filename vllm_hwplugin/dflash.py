# SPDX-License-Identifier: Apache-2.0
"""Checks of a DFlash engine's configuration and patches.

vLLM calls a platform at the end of `VllmConfig.__post_init__`: for each configuration, also for copies by
`dataclasses.replace` and for the draft's, in the parent and in workers. On another plugin's platform the V1 runner's
drafter calls before weights are loaded.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_hwplugin import patching
from vllm_hwplugin.base import gates, run_records
from vllm_hwplugin.base.features import DFLASH_FULL_GRAPH, gate_of
from vllm_hwplugin.spec_decode import dflash_config
from vllm_hwplugin.spec_decode.dflash_config import DFlashConfigError

logger = logging.getLogger("vllm.hwplugin")

_CHECK = "dflash-config"
_GATE = gate_of(DFLASH_FULL_GRAPH)


def check_and_update_config(vllm_config: Any) -> None:
    """Check a DFlash configuration, and that DFlash's patches are active.

    A platform's `check_and_update_config` calls it after its base class has decided the cudagraph mode, and so does the
    patched `DFlashProposer`. Other configurations are not touched.

    Raises:
        DFlashConfigError: draft, target and settings do not fit together.
        InstallError: a module was imported too early to be patched and a feature would be half patched; or a switch at
            `on` or strict mode demands a feature that is lost by this or by an internal error.
    """
    spec = vllm_config.speculative_config
    if spec is None or not spec.use_dflash():
        return
    patching.install()
    try:
        dflash_config.check(vllm_config)
    except DFlashConfigError:
        raise
    except Exception as error:
        # vLLM may be able to serve this configuration.
        if gates.is_on(gates.STRICT) or gates.demands(_GATE):
            raise patching.InstallError(
                f"a bug in vllm-hwplugin at {_CHECK}, which is an error in strict mode or with {_GATE}=on: "
                f"{type(error).__name__}: {error}; set {_GATE}=auto without strict mode to continue, and report it"
            ) from error
        logger.exception("DFlash: %s is left to vLLM, because the plugin failed", _CHECK)
        run_records.note(_CHECK, f"left to vLLM: {type(error).__name__}: {error}")
    # Usually this changes nothing: vLLM loads the plugin before it imports what the patches touch.
    patching.force()
