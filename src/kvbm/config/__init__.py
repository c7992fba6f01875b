"""Every setting of KVBM, declared once: environment, TOML files and connector JSON become one validated `Config`.

`table.py` declares the settings. `kinds.py` defines which values a setting accepts. `load.py` reads the sources. To add
a setting, add a field to `Config` in `table.py`.
"""

from kvbm.config.kinds import (
    Backends,
    Choice,
    ConfigError,
    FilePath,
    Host,
    Kind,
    Number,
    Switch,
    Text,
    split_shares,
)
from kvbm.config.load import ENVIRONMENT, EXTRA_CONFIG, load
from kvbm.config.setting import GROUPS, Setting
from kvbm.config.table import (
    BACKEND_PREFIX,
    CONSOLIDATOR_PORT_OFFSET,
    DEFAULT,
    SETTINGS,
    SYSTEM_FILE,
    Config,
)
from kvbm.config.tier_size import require_tier, slots_for

__all__ = [
    "BACKEND_PREFIX",
    "CONSOLIDATOR_PORT_OFFSET",
    "DEFAULT",
    "ENVIRONMENT",
    "EXTRA_CONFIG",
    "GROUPS",
    "SETTINGS",
    "SYSTEM_FILE",
    "Backends",
    "Choice",
    "Config",
    "ConfigError",
    "FilePath",
    "Host",
    "Kind",
    "Number",
    "Setting",
    "Switch",
    "Text",
    "load",
    "require_tier",
    "slots_for",
    "split_shares",
]
