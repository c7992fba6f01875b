"""A row of the table of settings, and the groups in which users see the rows."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvbm.config.kinds import Kind

# `kvbm config` and docs/configuration.md show the settings by group, in this order.
GROUPS = (
    GENERAL := "General",
    HOST := "Host tier",
    DISK := "Disk tier",
    OBJECTS := "Object store",
    PEERS := "Peers",
    MOVING := "Offloading and onboarding",
    LEADER := "Leader and workers",
    METRICS := "Metrics and records",
    EVENTS := "Block events",
    CONTROL := "Control and Dynamo",
    BACKENDS := "NIXL and NCCL",
)


class Setting(msgspec.Struct, frozen=True):
    """A row of the table. `key` is the name in TOML, in JSON and in `Config`; `env` is the name of the variable."""

    env: str
    group: str
    kind: Kind
    doc: str
    secret: bool = False  # never shown
    old_names: tuple[str, ...] = ()  # accepted with a warning
    unused: str = ""  # checked, but KVBM does not read it: why not, and which setting or action to use instead
    retired: str = ""  # ignored with a warning that contains this sentence; not a field of `Config`
    key: str = ""  # `settings_of` takes the key and the default from the field
    default: Any = None

    @property
    def used(self) -> bool:
        return not self.unused and not self.retired

    def show(self, value: object) -> str:
        """Return `value` as text for people; secrets are hidden."""
        if self.secret and value:
            return "(hidden)"
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, Mapping):
            return ", ".join(f"{name} {'on' if on else 'off'}" for name, on in sorted(value.items())) or "(none)"
        if isinstance(value, float) and value.is_integer():
            return str(int(value))
        return "(not set)" if value is None or value == "" else hide_credentials(str(value))


def settings_of(config: type[msgspec.Struct]) -> Iterator[Setting]:
    """Yield the settings that the fields of `config` declare."""
    for field in msgspec.structs.fields(config):
        for row in getattr(field.type, "__metadata__", ()):
            if isinstance(row, Setting):
                factory = field.default_factory
                default = field.default if factory is msgspec.NODEFAULT else factory()
                yield msgspec.structs.replace(row, key=field.name, default=default)


def hide_credentials(text: str) -> str:
    """Without the user and the password of a URL."""
    return re.sub(r"//[^/@\s]+@", "//(hidden)@", text)
