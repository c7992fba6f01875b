"""Nothing outside a tier's folder knows the tier: no import of the folder, no name, no setting of it.

A place that has to is listed here with the reason. Everything else asks the registry.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvbm.tiers.registry import TIERS

SOURCE = Path(__file__).parents[2] / "src" / "kvbm"
FOLDERS = sorted(path.name for path in (SOURCE / "tiers").iterdir() if (path / "__init__.py").is_file())
NAMES = sorted(TIERS)
WORDS = "|".join({*NAMES, *FOLDERS})
# A member that is about one tier: config.has_disk_tier, self._disk, sizes.host.
MEMBER = re.compile(rf"_?({WORDS})|has_({WORDS})_tier|({WORDS})_(tier|pool|store|index|file|slab)")

IMPORT, LITERAL, NAME = "import", "literal", "member"
ALLOWED = {
    # What a folder may do that is not the tier's own.
    "tiers/registry.py": ({IMPORT}, "the list of all tiers"),
    "tiers/host": ({IMPORT}, "host memory that persists is kept in the disk tier's format: index, checksums, lock"),
    "tiers/objects": ({IMPORT}, "blocks come from the disk too; tools copy a disk cache to a bucket"),
    "tiers/peers": ({IMPORT}, "engines serve each other the near tier's memory"),
    "testing/disk_faults.py": ({IMPORT}, "fault injection into the calls of one tier"),
    # The near tier's memory is the other end of every copy.
    "transfer": ({LITERAL}, "kernels have a parameter of that name"),
    "runtime/replicas.py": ({IMPORT}, "ranks with the same KV map one near slab"),
    # Users' words.
    "config": ({NAME}, "the rows of the settings, and which of them make a tier"),
    # Hosts of a network.
    "control/socket.py": ({NAME}, "the other end of a socket"),
    "bench/client.py": ({NAME}, "the host of a URL"),
    "cli/control.py": ({NAME}, "the host of a URL"),
    "observe/server.py": ({NAME}, "the host of a port"),
    # Tools about files of one kind.
    "cli/cache.py": ({IMPORT}, "shows and removes caches in directories"),
    "cli/bucket.py": ({IMPORT}, "shows caches in a bucket, and copies them to and from directories"),
    "doctor": ({IMPORT, NAME, LITERAL}, "a class a check, and a disk is checked as a disk"),
}


def allowed(path: str) -> set[str]:
    return next(
        (kinds for place, (kinds, _) in ALLOWED.items() if path == place or path.startswith(f"{place}/")), set()
    )


def own_folder(path: str) -> str:
    parts = path.split("/")
    return parts[1] if parts[0] == "tiers" and len(parts) > 2 else ""


def uses(tree: ast.AST, own: str = ""):
    """(kind, what, line) of every mention of a tier that is not in ``own``, the folder of the file."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        else:
            modules = []
        folders = {module.split(".")[2] for module in modules if re.match(rf"kvbm\.tiers\.({WORDS})(\.|$)", module)}
        for folder in sorted(folders & set(FOLDERS) - {own}):
            yield IMPORT, f"kvbm.tiers.{folder}", node.lineno
        if own:
            continue  # a tier may call itself by its name
        if isinstance(node, ast.Constant) and id(node) not in docstrings and node.value in NAMES:
            yield LITERAL, repr(node.value), node.lineno
        if isinstance(node, ast.Attribute) and MEMBER.fullmatch(node.attr):
            yield NAME, f".{node.attr}", node.lineno


def mentions(path: Path):
    name = path.relative_to(SOURCE).as_posix()
    yield from uses(ast.parse(path.read_text()), own_folder(name))


def test_no_place_but_the_listed_ones_knows_a_tier():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        kinds = allowed(name)
        found += [f"{name}:{line}: {kind} {what}" for kind, what, line in mentions(path) if kind not in kinds]
    assert found == []


@pytest.mark.parametrize("place", ALLOWED)
def test_a_listed_place_still_needs_its_entry(place):
    kinds, reason = ALLOWED[place]
    files = [SOURCE / place] if place.endswith(".py") else sorted((SOURCE / place).rglob("*.py"))
    assert reason
    assert {kind for path in files for kind, _, _ in mentions(path)} >= kinds


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("from kvbm.tiers.disk.file import DiskFile", IMPORT),
        ("from kvbm.tiers import disk as disk_tier", IMPORT),
        ("import kvbm.tiers.host.slab", IMPORT),
        ('if tier == "disk": pass', LITERAL),
        ("if config.has_disk_tier: pass", NAME),
        ("self._disk = None", NAME),
    ],
)
def test_a_mention_is_noticed(code, kind):
    assert [found for found, _, _ in uses(ast.parse(code))] == [kind]
