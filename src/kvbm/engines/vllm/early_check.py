"""Checks the settings when vLLM imports the connector: in the process that the user has started, before weights load.

The connector itself is made minutes later, in processes below that one. An error there ends up between the tracebacks
of three processes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from kvbm.config import ConfigError, load, require_tier
from kvbm.engines.vllm.transfer_config import extra_config, on_command_line


class SettingsRefusedError(RuntimeError):
    """The settings cannot be used. Not a ValueError: vLLM's configuration classes wrap those in one of their own."""


def check(extra: Mapping[str, Any]) -> None:
    """Raise `SettingsRefusedError` if an engine with this kv_connector_extra_config would not start."""
    try:
        require_tier(load(extra))
    except ConfigError as error:
        sys.excepthook = _print_alone
        raise SettingsRefusedError(str(error)) from None


def check_command_line(argv: Sequence[str]) -> None:
    """As :func:`check`, where the command line has the connector's JSON. Elsewhere the JSON is not known yet, and may
    override a value of the environment."""
    if (text := on_command_line(argv)) is not None and text.lstrip().startswith("{"):
        check(extra_config(text))


def _print_alone(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The message without a traceback: the user's settings are at fault, and no code is."""
    if isinstance(error, SettingsRefusedError):
        print(f"\nKVBM cannot start: {error}\n`kvbm doctor` checks the other settings.", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
