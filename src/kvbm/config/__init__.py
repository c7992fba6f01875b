"""Every setting of KVBM, declared once: environment, TOML files and connector JSON become one validated `Config`.

`table.py` declares the settings. `kinds.py` defines which values a setting accepts. `load.py` reads the sources. To add
a setting, add a field to `Config` in `table.py`.
"""

from kvbm.config.kinds import Choice, ConfigError, Number, Switch, split_shares
from kvbm.config.load import load
from kvbm.config.setting import GROUPS, Setting
from kvbm.config.table import DEFAULT, SETTINGS, SYSTEM_FILE, Config
from kvbm.config.tier_size import require_tier, slots_for

__all__ = [
    "DEFAULT",
    "GROUPS",
    "SETTINGS",
    "SYSTEM_FILE",
    "Choice",
    "Config",
    "ConfigError",
    "Number",
    "Setting",
    "Switch",
    "load",
    "require_tier",
    "slots_for",
    "split_shares",
]
