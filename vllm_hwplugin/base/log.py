# SPDX-License-Identifier: Apache-2.0
"""The plugin's log lines: each begins with `vllm-hwplugin:`, and none is lost before vLLM has configured logging.

vLLM up to 0.30 configures logging while it is imported. From 0.31 on it does so with the parsed arguments, after it has
loaded its plugins. The plugin's first lines have no handler until then: Python drops those below WARNING and prints the
others bare. :func:`prepare` keeps them until vLLM has configured logging, and then logs them in its format.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
from types import ModuleType
from typing import Any, Final

_PREFIX: Final = "vllm-hwplugin:"

# vLLM calls it whenever it configures logging, also with VLLM_CONFIGURE_LOGGING=0.
_CONFIGURE: Final = "_configure_vllm_root_logger"
# vLLM's last logging configuration; only versions that configure logging after plugins have this attribute.
_LAST: Final = "_last_configured_logging_config"

_logger = logging.getLogger("vllm.hwplugin")


class _Kept(logging.Handler):
    """Keeps the plugin's lines until vLLM has configured logging."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._module, self._configure = module, getattr(module, _CONFIGURE)
        self._level, self._propagate = _logger.level, _logger.propagate

    def begin(self) -> None:
        # Lines below the level that vLLM will set are dropped when the lines are given out.
        _logger.setLevel(logging.DEBUG)
        _logger.propagate = False
        _logger.addHandler(self)

        @functools.wraps(self._configure)
        def configure(*args: Any, **kwargs: Any) -> Any:
            result = self._configure(*args, **kwargs)
            give_out()
            return result

        setattr(self._module, _CONFIGURE, configure)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            # As text: a traceback's frames would keep the tensors of a failed capture alive.
            record.exc_text, record.exc_info = logging.Formatter().formatException(record.exc_info), None
        self.records.append(record)

    def end(self) -> None:
        setattr(self._module, _CONFIGURE, self._configure)
        # `dictConfig` removes the handler if it sets up vLLM's loggers; its settings then stay.
        if self in _logger.handlers:
            _logger.removeHandler(self)
            _logger.setLevel(self._level)
            _logger.propagate = self._propagate
        for record in self.records:
            if _logger.isEnabledFor(record.levelno):
                # A new record has what vLLM's record factory adds for its format; time and place are the old record's.
                fresh = _logger.makeRecord(
                    record.name, record.levelno, record.pathname, record.lineno, record.msg, (), record.exc_info
                )
                vars(fresh).update(vars(record))
                _logger.callHandlers(fresh)
        self.records.clear()


_kept: _Kept | None = None


def prepare() -> None:
    """Prefix the plugin's lines, and keep them until logging is configured."""
    global _kept
    _logger.addFilter(_begin)
    module = sys.modules.get("vllm.logger")
    if module is None or _kept is not None or logging.getLogger("vllm").handlers:
        return
    if hasattr(module, _CONFIGURE) and getattr(module, _LAST, module) is None:
        _kept = _Kept(module)
        _kept.begin()


def give_out() -> None:
    """Log the kept lines, as logging is configured now."""
    global _kept
    if _kept is not None:
        lines, _kept = _kept, None
        lines.end()


@functools.cache
def once(text: str, level: int = logging.WARNING) -> None:
    """Log once per process: an engine's configuration is made several times."""
    _logger.log(level, "%s", text, stacklevel=2)


def _begin(record: logging.LogRecord) -> bool:
    if not str(record.msg).startswith(_PREFIX):
        record.msg = f"{_PREFIX} {record.msg}"
    return True


def _begin_anew() -> None:
    # The parent logs its lines; a forked child may end without atexit, so it keeps none.
    if _kept is not None:
        _kept.records.clear()
        give_out()


os.register_at_fork(after_in_child=_begin_anew)
# For a process in which vLLM never configures logging; atexit calls this before logging shuts down.
atexit.register(give_out)
