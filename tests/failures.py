# SPDX-License-Identifier: Apache-2.0
"""What each kind of failure does to a process of vLLM, as data: `python -m tests.failures` writes docs/failures.md.

The code where a failure is met decides; `test_failures` brings about every row, under every column, and compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, NamedTuple

Outcome = Literal["stops", "off", "all off", "said", "nothing"]

MEANING: Final[dict[Outcome, str]] = {
    "stops": "the process ends with an error that says what, where, why, and the way out",
    "off": "that feature (operation, layer) is off and vLLM runs stock there; a warning says why; the others are live",
    "all off": "no patch is in force, or no operation has the plugin's kernel, and vLLM runs stock; the log says why",
    "said": "a line in the log and an entry in the process's journal; nothing else changes",
    "nothing": "not even a line in the log, because nothing is wrong",
}


class Failure(NamedTuple):
    """One row.

    Attributes:
        id: for the test.
        what: the failure, as the page says it.
        auto: what it does where every gate has its default.
        on: where the gate of the feature that is concerned says ``on``; None where it has no such gate.
        strict: where ``VLLM_HWPLUGIN_STRICT=1``.
    """

    id: str
    what: str
    auto: Outcome
    on: Outcome | None
    strict: Outcome


PATCHES: Final = (
    Failure(
        "misfit",
        "a diff does not fit vLLM's text: lines changed or are found twice, a file is missing, the result is no Python",
        "off",
        "stops",
        "stops",
    ),
    Failure("conflict", "two features change the same lines (the later one is concerned)", "off", "stops", "stops"),
    Failure(
        "unreadable",
        "a file of vLLM that the feature changes is there and cannot be read",
        "off",
        "stops",
        "stops",
    ),
    Failure(
        "imported",
        "a module of the feature was imported before the plugin and cannot be patched in place",
        "off",
        "stops",
        "stops",
    ),
    Failure(
        "distribution",
        "the distribution that a feature of your own changes is not installed, or not imported from where it is",
        "off",
        "stops",
        "stops",
    ),
    Failure(
        "catalogue",
        "a catalogue of your own cannot be read, is not trusted, or has a name or gate that is taken (its features are "
        "off)",
        "off",
        "stops",
        "stops",
    ),
    Failure("requirement", "a feature that this one requires cannot be live", "off", "stops", "stops"),
    Failure(
        "contradiction",
        "a feature that this one requires is switched off (this one is off, too)",
        "nothing",
        "stops",
        "nothing",
    ),
    Failure("upstream", "vLLM has the change already, or does not need it", "nothing", "nothing", "nothing"),
    Failure(
        "unlisted",
        "vLLM's version is not one that the plugin knows, and `VLLM_HWPLUGIN_TRY_UNLISTED` is not set",
        "all off",
        "stops",
        "stops",
    ),
    Failure(
        "undecided",
        "nothing can be decided: no vLLM, none that states its version, no folder for the copies that can be trusted, "
        "a damaged installation of the plugin, or a fault in it",
        "all off",
        "stops",
        "stops",
    ),
    Failure(
        "bad value",
        "a variable of the plugin has a value that is not one of the good ones",
        "all off",
        "stops",
        "stops",
    ),
    Failure(
        "own bad value",
        "the gate of a feature of your own has a value that is not one of the good ones",
        "off",
        None,
        "stops",
    ),
    Failure(
        "mixture",
        "a module that must run stock runs patched already, or the other way round",
        "stops",
        "stops",
        "stops",
    ),
    Failure(
        "overtaken",
        "another import hook kept every module of the feature that is imported from being patched, as shows when "
        "the engine stands",
        "off",
        "stops",
        "stops",
    ),
    Failure(
        "other patches",
        "a process of an engine comes to other patches than the first one: something was changed in between",
        "said",
        "stops",
        "stops",
    ),
    Failure(
        "other tree",
        "another vLLM has taken the package's place on the path since the patches were computed",
        "stops",
        "stops",
        "stops",
    ),
    Failure(
        "copy",
        "the patched copy of a module is lost or changed when the module is imported, and cannot be written again",
        "stops",
        "stops",
        "stops",
    ),
    Failure(
        "DFlash module",
        "DFlash: a module with whole features in it was imported past the plugin, and cannot be patched",
        "off",
        "stops",
        "stops",
    ),
    Failure("DFlash mixture", "DFlash: the same of a module that has parts of features", "stops", "stops", "stops"),
    Failure(
        "DFlash config",
        "DFlash: draft, target and attention backend do not fit together, in any version of vLLM",
        "stops",
        "stops",
        "stops",
    ),
    Failure(
        "DFlash served",
        "DFlash: a draft or a setting that some version of vLLM serves, with fewer accepted tokens",
        "said",
        "stops",
        "said",
    ),
    Failure(
        "DFlash fault", "DFlash: the plugin fails at a configuration, through a fault in it", "said", "stops", "stops"
    ),
    Failure(
        "engine",
        "a feature is live and the engine that is configured cannot have it: runner, method, backend, mode, or a graph "
        "that cannot be recorded",
        "said",
        "stops",
        "said",
    ),
)

OTHERS: Final = (
    Failure(
        "unknown variable", "a variable with the plugin's prefix is no variable of this release", "said", None, "said"
    ),
    Failure("second place", "a folder of the cache cannot be used, and the next one can", "said", None, "said"),
    Failure(
        "operation",
        "one of vLLM's operations has other arguments than are known",
        "off",
        "stops",
        "off",
    ),
    Failure(
        "operations",
        "no kernel can stand under the names of vLLM's operations: `vllm._custom_ops` cannot be imported, or this "
        "PyTorch lacks a call",
        "all off",
        "stops",
        "all off",
    ),
    Failure("kernel", "the kernel of an operation cannot be built or loaded at its first call", "off", "stops", "off"),
    Failure("skip list", "`VLLM_HWPLUGIN_OPS_SKIP` names an operation that no kernel is for", "said", "stops", "stops"),
    Failure(
        "attention misfit",
        "the plugin's FLASH_ATTN does not fit a layer with heads above 256, and vLLM has a backend",
        "said",
        "stops",
        "said",
    ),
    Failure("attention none", "the same, and vLLM has none", "stops", "stops", "stops"),
    Failure(
        "attention import",
        "the plugin's FLASH_ATTN cannot be imported or asked, and vLLM has a backend",
        "said",
        "stops",
        "stops",
    ),
    Failure(
        "attention kernel",
        "the CUDA kernel of the plugin's FLASH_ATTN would be faster and cannot be had (with `on` its Triton kernels "
        "serve)",
        "said",
        "said",
        "stops",
    ),
    Failure(
        "attention warm-up",
        "attention kernels that compile at their first use cannot be compiled before serving (MUSA)",
        "said",
        None,
        "stops",
    ),
    Failure(
        "platform",
        "the platform class cannot be offered through a fault, or is named in `VLLM_HWPLUGIN_PLATFORM` and does not "
        "fit the host",
        "said",
        None,
        "stops",
    ),
)

FAILURES: Final = PATCHES + OTHERS


PAGE: Final = Path(__file__).parents[1] / "docs" / "failures.md"


def markdown() -> str:
    """The text of docs/failures.md."""
    lines = [
        "# What a failure does",
        "",
        "Written by `python -m tests.failures`; a test brings about every row under every column.",
        "",
        "`auto`, the default: the plugin ends no process that vLLM could serve without it, unless a mixture of",
        "patched and stock code would run. `on` demands that one feature: the process ends unless the feature takes",
        "part, or vLLM has the change already, or does not need it. `VLLM_HWPLUGIN_STRICT=1` demands that nothing is",
        "wrong with the plugin: the process ends where a feature that is not switched off should work and cannot. An",
        "engine that a feature is not for is nothing wrong. `off` is no error by itself. `vllm-hwplugin doctor` exits",
        "with 1 where a process would end at its start, or the plugin would do nothing in it, as far as that can be",
        "told without one.",
        "",
        *(f"- **{outcome}**: {meaning}." for outcome, meaning in MEANING.items()),
        "",
        *_table("failure of a patch", PATCHES),
        "",
        *_table("failure of something else", OTHERS),
        "",
        "*on* is the gate of the feature, the operations or the attention in the row (of any feature, where all",
        "patches are). A dash: there is no such gate, or it is itself what is wrong.",
    ]
    return "\n".join(lines) + "\n"


def _table(title: str, failures: tuple[Failure, ...]) -> list[str]:
    rows = [f"| {title} | auto | on | `VLLM_HWPLUGIN_STRICT=1` |", "|---|---|---|---|"]
    return [*rows, *(f"| {item.what} | {item.auto} | {item.on or '-'} | {item.strict} |" for item in failures)]


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
