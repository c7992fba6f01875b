"""`kvbm cache` and `kvbm doctor` where other users can write: nothing hangs, nothing else is touched, nothing raw is
printed."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from kvbm.cli.main import main
from kvbm.observe.format import printable
from kvbm.tiers.disk import inspect as caches
from kvbm.tiers.disk.cache_dir import DESCRIPTION, KEY_MAP, LOCK, cache_directory, slab_path
from kvbm.tiers.disk.file import DiskFile
from kvbm.tiers.disk.index import DATABASE, Index

SLOT, SLOTS = 4096, 4
STRANGER = 65534
FILES = (DESCRIPTION, DATABASE, f"{DATABASE}-wal", LOCK, KEY_MAP, "rank-0.slab", "rank-0.slab.sums")
KINDS = ("link", "dangling", "hard link", "fifo", "socket", "directory", "device", "stranger", "writable")
ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\n\u202egnp.exe\u2066\x9b31m"


def make_cache(root: Path, model: str) -> Path:
    what = {"model": model, "dtype": "bfloat16"}
    path = cache_directory(root, what)
    index = Index.open(path, what, SLOTS)
    index.put([(b"k" * 32, 1)])
    index.close()
    DiskFile(slab_path(path, 0), SLOTS, SLOT, threads=1).close()
    return path


@pytest.fixture
def root():
    """Short enough for the path of a socket, and of the kind that /tmp is."""
    with tempfile.TemporaryDirectory(prefix="kvbm-tests-", dir="/tmp") as path:
        os.chmod(path, 0o1777)
        yield Path(path)


@pytest.fixture
def precious(tmp_path):
    """A cache that no command names."""
    path = make_cache(tmp_path, "org/precious")
    before = content(path)
    yield path
    assert content(path) == before


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def plant(kind: str, file: Path, target: Path) -> None:
    """Put something of this kind in the place of a file."""
    old = file.read_bytes() if file.exists() else b""
    file.unlink(missing_ok=True)
    if kind == "link":
        file.symlink_to(target)
    elif kind == "dangling":
        file.symlink_to(target.with_name("missing"))
    elif kind == "hard link":
        os.link(target, file)
    elif kind == "fifo":
        os.mkfifo(file, 0o600)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(file))
    elif kind == "directory":
        file.mkdir()
    elif kind == "device":
        if os.geteuid() != 0:
            pytest.skip("only root can make a device")
        os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # endless zeros
    else:
        file.write_bytes(old)
        file.chmod(0o666)
        if kind == "stranger":
            if os.geteuid() != 0:
                pytest.skip("only root can give a file away")
            os.chown(file, STRANGER, STRANGER)


@pytest.fixture
def kvbm(capfd):
    """Runs a command: (exit code, output, errors). Fails when it does not come back."""

    def run(*arguments: object) -> tuple[int, str, str]:
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(main([*map(str, arguments)])), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), f"{arguments} hangs"
        out, err = capfd.readouterr()
        for text in (out, err):
            assert all(c.isprintable() or c == "\n" for c in text), text
        (code,) = answers
        return code, out, err

    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_whatever_lies_in_the_place_of_a_file(root, precious, kvbm, name, kind):
    good, cache = make_cache(root, "org/good"), make_cache(root, "org/planted")
    target = precious / name if (precious / name).exists() else precious / DATABASE
    other = precious.parent / "other"
    if kind == "hard link":  # not of the precious one: that is to stay as it is
        other.write_bytes(b"other")
        target = other
    plant(kind, cache / name, target)
    before = sorted(os.listdir(cache))
    for action in ("ls", "stat", "verify", "clear"):
        code, out, err = kvbm("cache", action, cache)
        assert code == 2, out
        assert err.startswith("kvbm: "), err
        assert name in err
        assert sorted(os.listdir(cache)) == before
    code, out, _ = kvbm("cache", "ls", root)
    assert code == 2
    assert "org/good" in out
    code, out, _ = kvbm("cache", "clear", "--all", root)
    assert code == 2
    assert good.name in out
    assert not good.exists()
    assert sorted(os.listdir(cache)) == before
    assert kind != "hard link" or other.read_bytes() == b"other"


def configure(monkeypatch, root: Path) -> Path:
    """The disk tier's directory; the host tier's is above it."""
    disk = root / "disk"
    disk.mkdir()
    for name, value in {
        "DYN_KVBM_CPU_CACHE_GB": "0.1",
        "DYN_KVBM_DISK_CACHE_GB": "0.2",
        "DYN_KVBM_DISK_CACHE_DIR": str(disk),
        "KVBM_HOST_PERSIST": "1",
        "KVBM_HOST_PERSIST_DIR": str(root),
    }.items():
        monkeypatch.setenv(name, value)
    return disk


@pytest.mark.parametrize("kind", ["fifo", "link", "device"])
def test_doctor_comes_back_too(root, precious, kvbm, kind, monkeypatch):
    for folder in (root, configure(monkeypatch, root)):
        cache = make_cache(folder, "org/planted")
        plant(kind, cache / "rank-0.slab", precious / "rank-0.slab")
        (folder / "kvbm-linked").symlink_to(precious)
    _, out, _ = kvbm("doctor", "--quick", "--json")
    names = {finding["name"] for finding in json.loads(out)["findings"]}
    assert not names & {"disk-not-private", "memory-not-kept", "check-failed"}
    assert "memory-kept" not in names  # the links, and the cache that cannot be trusted, count for nothing


def test_doctor_names_a_directory_that_cannot_be_opened(root, kvbm, monkeypatch):
    def fail(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    configure(monkeypatch, root)
    monkeypatch.setattr("kvbm.doctor.tiers.open_trusted", fail)
    _, out, _ = kvbm("doctor", "--quick", "--json")
    found = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert "Stale file handle" in found["disk-not-writable"]["text"]
    assert "check-failed" not in found


def test_doctor_probes_no_file_where_others_could_exchange_it(root, kvbm, monkeypatch):
    root.chmod(0o777)
    configure(monkeypatch, root)
    code, out, _ = kvbm("doctor", "--quick", "--json")
    found = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert code == 1
    assert f"`chmod go-w {root}`" in found["disk-not-private"]["text"]
    assert "set KVBM_HOST_PERSIST_DIR" in found["memory-not-kept"]["text"]
    assert "disk" not in found


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"fingerprint": ' * 50_000,
        '{"fingerprint": {"model": "x"}, "slots": 1e999}',
        '{"fingerprint": {"model": "x"}, "slots": %s}' % ("9" * 4000),
        '{"fingerprint": {"model": {"deep": [1]}}, "slots": 3}',
        '{"fingerprint": [["model", "x"]], "slots": 3}',
        '{"fingerprint": {}, "slots": "3"}',
        "3",
        "",
        "\udcff\udcc0",
    ],
    ids=range(10),
)
def test_a_description_that_is_none(root, kvbm, text):
    cache = make_cache(root, "org/broken")
    (cache / DESCRIPTION).write_bytes(text.encode(errors="surrogateescape"))
    for action in ("ls", "stat"):
        code, _, err = kvbm("cache", action, root)
        assert code == 2
        assert f"{cache / DESCRIPTION} cannot be read" in err
    assert kvbm("cache", "clear", cache)[0] == 0
    assert not cache.exists()


def test_files_of_any_size_are_not_read_whole(root, kvbm):
    cache = make_cache(root, "org/huge")
    for name in (DESCRIPTION, "rank-0.slab.sums"):
        os.truncate(cache / name, 1 << 40)
        code, _, err = kvbm("cache", "ls" if name == DESCRIPTION else "verify", cache)
        assert code == 2
        assert name in err
    assert kvbm("cache", "clear", cache)[0] == 0


@pytest.mark.parametrize("slot_bytes", [b"1099511627776", b"-4096", b"1", b"x", b"9" * 2000])
def test_slots_of_any_size_are_not_believed(root, kvbm, slot_bytes):
    cache = make_cache(root, "org/odd")
    with open(cache / "rank-0.slab.sums", "r+b") as file:
        file.write(b"kvbm sums 1\nslot_bytes " + slot_bytes + b"\n")
    assert kvbm("cache", "ls", cache)[0] == 0
    code, _, err = kvbm("cache", "verify", cache)
    assert code == 2
    assert "rank-0.slab.sums cannot be read" in err


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "clear"])
def test_escapes_are_not_printed_raw(root, kvbm, action):
    cache = make_cache(root, "org/escapes")
    text = json.loads((cache / DESCRIPTION).read_text())
    text["fingerprint"] |= {"model": ESCAPES, ESCAPES: ESCAPES * 1000}
    (cache / DESCRIPTION).write_text(json.dumps(text))
    cache = cache.rename(root / f"kvbm-{ESCAPES}")
    (cache / "rank-0.slab").rename(cache / f"rank-{ESCAPES}.slab")
    (cache / "rank-0.slab.sums").rename(cache / f"rank-{ESCAPES}.slab.sums")
    (root / f"kvbm-link-{ESCAPES}").symlink_to("/")
    code, out, err = kvbm("cache", action, *(["--all"] if action == "clear" else []), root)
    assert code == (1 if action == "verify" else 0)
    assert "\\x1b" in out
    assert "links are not followed: kvbm-link-\\x1b" in err
    assert max(map(len, out.splitlines())) < 2000


def test_printable_text_stays_as_it_is():
    assert printable("org/Модель-8B 模型 é") == "org/Модель-8B 模型 é"
    assert printable("x" * 300, 10) == "x" * 7 + "..."
    assert printable("a\ud800b") == "a\\ud800b"


def test_clear_does_not_follow_a_link_to_a_cache(root, precious, kvbm):
    (root / "kvbm-linked").symlink_to(precious)
    assert caches.find(root) == []
    code, out, err = kvbm("cache", "clear", "--all", root)
    assert (code, out) == (1, "")  # there is no cache to clear
    assert "links are not followed: kvbm-linked" in err
    code, _, err = kvbm("cache", "clear", root / "kvbm-linked")
    assert code == 2
    assert "is not a directory of this user" in err


def test_nothing_is_removed_where_others_can_exchange_it(root, kvbm):
    cache = make_cache(root, "org/model")
    root.chmod(0o777)
    for arguments in (["--all", root], [cache]):
        code, out, err = kvbm("cache", "clear", *arguments)
        assert (code, out) == (2, "")
        assert f"`chmod go-w {root}`" in err
    assert cache.exists()
    root.chmod(0o1777)
    cache.chmod(0o770)
    code, out, err = kvbm("cache", "clear", "--all", root)
    assert (code, out) == (2, "")
    assert f"`chmod 700 {cache}`" in err


def test_a_description_in_a_shared_directory_hides_no_cache(root, kvbm):
    make_cache(root, "org/good")
    (root / DESCRIPTION).write_text("{}")
    code, out, _ = kvbm("cache", "ls", root)
    assert code == 0
    assert "org/good" in out


def test_one_directory_that_is_refused_does_not_hide_the_other(root, tmp_path, kvbm, monkeypatch):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    make_cache(root, "org/good")
    monkeypatch.setenv("DYN_KVBM_DISK_CACHE_DIR", str(tmp_path / "shared"))
    monkeypatch.setenv("KVBM_HOST_PERSIST_DIR", str(root))
    code, out, err = kvbm("cache", "ls")
    assert code == 2
    assert "org/good" in out
    assert f"{tmp_path}/shared belongs to" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_caches_of_other_users_are_left_alone(root, kvbm):
    cache = make_cache(root, "org/theirs")
    os.chown(cache, STRANGER, STRANGER)
    assert kvbm("cache", "ls", root)[2] == f"no caches in {root}\n"
    assert kvbm("cache", "clear", "--all", root)[2] == f"no caches in {root}\n"
    for action in ("ls", "verify", "clear"):
        code, _, err = kvbm("cache", action, cache)
        assert code == 2
        assert f"{cache} belongs to uid {STRANGER}" in err
    assert len(os.listdir(cache)) > 4
