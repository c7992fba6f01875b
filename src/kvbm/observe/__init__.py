"""How KVBM lets itself be watched. Nothing here decides anything, and nothing here may cost an engine's step time."""
