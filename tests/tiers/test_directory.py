"""Where a cache may lie: no other user of the machine gets a file of theirs opened in the place of ours."""

from __future__ import annotations

import grp
import logging
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvbm import config as settings
from kvbm.control.discovery import FileRegistry
from kvbm.runtime.channel import ChannelError, local
from kvbm.runtime.rank import Rank
from kvbm.tiers import directory
from kvbm.tiers.directory import CacheRefused, open_trusted, private_directory
from kvbm.tiers.disk.cache_dir import slab_path
from kvbm.tiers.disk.file import ALIGNMENT, DiskFile
from kvbm.tiers.disk.index import Index
from kvbm.tiers.disk.open import DiskDirectoryError
from tiernames import HOST

STRANGER = 65534
WHAT = {"model": "some-model", "block_size": 16}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def place():
    """A directory that other users can enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="kvbm-tests-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def folder(path: Path, mode: int = 0o755, owner: int = -1) -> Path:
    path.mkdir(parents=True)
    if owner >= 0:
        os.chown(path, owner, owner)
    path.chmod(mode)
    return path


@pytest.fixture
def belongs_to(monkeypatch):
    """Says of one directory that it belongs to another user, for those of us that cannot give one away."""
    fstat = os.fstat

    def pretend(path: Path, owner: int) -> None:
        there = path.stat()

        def answer(fd: int) -> os.stat_result:
            found = fstat(fd)
            if not os.path.samestat(found, there):
                return found
            return os.stat_result((*found[:4], owner, *found[5:]))

        monkeypatch.setattr(os, "fstat", answer)

    return pretend


# -- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_directory_above_that_belongs_to_another_user_is_refused(tmp_path, belongs_to, depth):
    cache = tmp_path / "a" / "b" / "kvbm-x"
    private_directory(cache)
    owner = cache.parents[depth - 1]
    belongs_to(owner, 12345)
    with pytest.raises(CacheRefused) as refused:
        private_directory(cache)
    for part in (str(owner), "uid 12345", f"`chown root {owner}`", "Set DYN_KVBM_DISK_CACHE_DIR to"):
        assert part in refused.value.strerror


@pytest.mark.parametrize(("mode", "repair"), [(0o775, "chmod g-w"), (0o777, "chmod go-w"), (0o757, "chmod go-w")])
def test_a_directory_above_that_others_can_write_to_is_refused(tmp_path, mode, repair):
    shared = folder(tmp_path / "shared", mode)
    with pytest.raises(CacheRefused) as refused:
        private_directory(shared / "deep" / "kvbm-x")
    for part in (f"{shared} belongs to uid {os.geteuid()}", f"mode {mode:04o}", f"`{repair} {shared}`"):
        assert part in refused.value.strerror
    assert list(shared.iterdir()) == []


@pytest.fixture
def own_group(monkeypatch):
    """Group 4711 is that of this user alone; the test changes what it likes."""
    known = SimpleNamespace(
        user=pwd.struct_passwd(("engine", "x", os.geteuid(), 4711, "", "/", "")),
        group=grp.struct_group(("engine", "x", 4711, [])), others=[],
    )  # fmt: skip
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: known.user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: known.group)
    monkeypatch.setattr(pwd, "getpwall", lambda: [known.user, *known.others])
    return known


@as_root
def test_a_directory_that_the_group_of_this_user_alone_can_write_to_is_fine(tmp_path, own_group):
    shared = folder(tmp_path / "shared")
    os.chown(shared, -1, 4711)
    shared.chmod(0o775)
    private_directory(shared / "kvbm-x")
    shared.chmod(0o777)
    with pytest.raises(CacheRefused, match="mode 0777"):
        private_directory(shared / "kvbm-x")
    shared.chmod(0o775)
    other = pwd.struct_passwd(("other", "x", 4712, 4711, "", "/", ""))
    for field, value in {
        "group": grp.struct_group(("engine", "x", 4711, ["engine", "other"])),
        "user": pwd.struct_passwd(("other", "x", os.geteuid(), 4711, "", "/", "")),
        "others": [other],
    }.items():
        before = getattr(own_group, field)
        setattr(own_group, field, value)
        with pytest.raises(CacheRefused, match="mode 0775"):
            private_directory(shared / "kvbm-x")
        setattr(own_group, field, before)
    private_directory(shared / "kvbm-x")


@as_root
def test_an_access_control_list_may_let_others_write(tmp_path, own_group, monkeypatch):
    shared = folder(tmp_path / "shared")
    os.chown(shared, -1, 4711)
    shared.chmod(0o775)
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"a list")
    with pytest.raises(CacheRefused, match="mode 0775"):
        private_directory(shared / "kvbm-x")


def test_a_sticky_directory_is_as_good_as_tmp(tmp_path):
    private_directory(folder(tmp_path / "shared", 0o1777) / "kvbm-x")


@pytest.mark.parametrize(("mode", "good"), [(0o755, True), (0o1777, False)])
def test_an_unmapped_user_may_be_root_but_not_in_a_sticky_directory(tmp_path, monkeypatch, mode, good):
    """As in a user namespace that does not map root: / belongs to the user that stands for all the others."""
    above = folder(tmp_path / "above", mode)
    theirs = folder(above / "theirs")
    unmapped = [Path("/").stat(), theirs.stat()]
    fstat = os.fstat

    def answer(fd: int) -> os.stat_result:
        found = fstat(fd)
        is_theirs = any(os.path.samestat(found, each) for each in unmapped)
        return os.stat_result((*found[:4], directory.OVERFLOW_UID, *found[5:])) if is_theirs else found

    monkeypatch.setattr(os, "fstat", answer)
    if good:
        private_directory(theirs / "kvbm-x")
    else:
        with pytest.raises(CacheRefused, match=f"{theirs} belongs to uid {directory.OVERFLOW_UID}"):
            private_directory(theirs / "kvbm-x")


def test_this_namespace_maps_every_user_or_says_which():
    lines = Path("/proc/self/uid_map").read_text().split("\n")
    assert directory.maps_every_user() == any(line.split() == ["0", "0", "4294967295"] for line in lines)


def test_looking_at_a_directory_does_not_change_its_mode(tmp_path):
    seen = folder(tmp_path / "kvbm-x", 0o755)
    private_directory(seen, make=False)
    assert stat.S_IMODE(seen.stat().st_mode) == 0o755
    private_directory(seen)
    assert stat.S_IMODE(seen.stat().st_mode) == 0o700


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_second_name_of_ones_own_file_is_removed_and_not_the_cache(tmp_path, link):
    private_directory(tmp_path / "kvbm-x")
    (tmp_path / "elsewhere").touch()
    link(tmp_path / "elsewhere", tmp_path / "kvbm-x" / "index.sqlite")
    with pytest.raises(CacheRefused, match="remove that file"):
        private_directory(tmp_path / "kvbm-x")


def test_the_usual_places_are_fine():
    for path in ("/tmp", "/dev/shm"):
        os.close(open_trusted(Path(path)))


def test_directories_that_are_made_pass_the_next_time_whatever_the_umask(tmp_path):
    mask = os.umask(0)
    try:
        private_directory(tmp_path / "a" / "b" / "kvbm-x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "a/b/kvbm-x").stat().st_mode) == 0o700
    private_directory(tmp_path / "a" / "b" / "kvbm-x")


def test_links_of_our_own_are_followed_to_places_that_are_checked_too(tmp_path):
    (tmp_path / "here").symlink_to(folder(tmp_path / "there"))
    (tmp_path / "again").symlink_to("x/../here/.")
    folder(tmp_path / "x")
    private_directory(tmp_path / "again" / "deep" / "kvbm-x")
    assert (tmp_path / "there" / "deep" / "kvbm-x").is_dir()
    (tmp_path / "there").chmod(0o777)
    with pytest.raises(CacheRefused, match=f"{tmp_path}/there belongs"):
        private_directory(tmp_path / "again" / "deep" / "kvbm-x")


def test_links_in_a_circle_end(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="levels of symbolic links"):
        private_directory(tmp_path / "a" / "kvbm-x")


def test_relative_paths_are_checked_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(folder(tmp_path / "shared", 0o777))
    with pytest.raises(CacheRefused, match=f"{tmp_path}/shared"):
        private_directory(Path("kvbm-x"))
    monkeypatch.chdir(tmp_path)
    private_directory(Path("caches") / "kvbm-x")


def test_a_file_on_the_way_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        private_directory(tmp_path / "file" / "kvbm-x")


@pytest.mark.parametrize("kind", ["link", "hard link", "writable", "dangling"])
def test_a_file_that_may_have_been_planted_is_refused(tmp_path, kind):
    cache = tmp_path / "kvbm-x"
    private_directory(cache)
    target, slab = tmp_path / "precious", slab_path(cache, 0)
    target.write_bytes(b"precious")
    if kind == "link":
        slab.symlink_to(target)
    elif kind == "dangling":
        slab.symlink_to(tmp_path / "missing")
    elif kind == "hard link":
        os.link(target, slab)
    else:
        slab.touch()
        slab.chmod(0o666)
    cache.chmod(0o777)
    with pytest.raises(CacheRefused, match=r"'rank-0.slab' in .* cannot be trusted"):
        private_directory(cache)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert target.read_bytes() == b"precious"


def test_the_name_of_a_planted_file_does_not_reach_a_terminal(tmp_path):
    cache = folder(tmp_path / "kvbm-x", 0o777)
    (cache / "\x1b[2J\nERROR all is lost").symlink_to("anywhere")
    with pytest.raises(CacheRefused) as refused:
        private_directory(cache)
    assert "\x1b" not in refused.value.strerror
    assert "\n" not in refused.value.strerror


def test_no_handle_is_left_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    shared = folder(tmp_path / "shared", 0o777)
    for _ in range(20):
        private_directory(tmp_path / "kvbm-x")
        for wrong in (shared / "kvbm-x", tmp_path / "missing", tmp_path / "missing" / "kvbm-x"):
            with pytest.raises(OSError, match=r"belongs to|No such file"):
                private_directory(wrong, make=False)
    assert len(os.listdir("/proc/self/fd")) == before


# -- everything that has such a directory -----------------------------------------------------------------------------


@contextmanager
def refused_rank(caplog, **values):
    config = settings.load(extra={"cpu_cache_override_num_blocks": 4, **values}, environ={}, files=[])
    rank = Rank(config, 0, 1, cache=WHAT, keeps_host=True)
    with caplog.at_level(logging.WARNING, "kvbm"):
        rank.register({"layer": torch.zeros(8, 2, 640, dtype=torch.int32)}, 8)
        yield config, rank.open()
    rank.close()


@pytest.mark.parametrize("kind", ["shared", "file", "read-only"])
def test_an_unusable_disk_directory_stops_the_start_and_names_its_setting(tmp_path, caplog, kind):
    place = tmp_path / "place"
    reason = "Not a directory"
    if kind == "shared":
        folder(place, 0o777)
        reason = f"{place} belongs to"
    elif kind == "file":
        place.touch()
    else:
        place.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(place)], capture_output=True).returncode:
            pytest.skip("this user cannot mount a filesystem")
        reason = "Read-only file system"
    try:
        with (
            pytest.raises(DiskDirectoryError, match=f"DYN_KVBM_DISK_CACHE_DIR={place} cannot be used: {reason}"),
            refused_rank(caplog, disk_cache_override_num_blocks=4, disk_cache_dir=str(place)),
        ):
            pytest.fail("the rank has opened")
    finally:
        if kind == "read-only":
            subprocess.run(["umount", str(place)], check=True)
    assert kind != "shared" or list(place.iterdir()) == []


def test_a_host_tier_in_such_a_place_ends_with_the_engine(tmp_path, caplog):
    shared = folder(tmp_path / "shared", 0o777)
    with refused_rank(caplog, host_persist=True, host_persist_dir=str(shared)) as (_, hello):
        assert list(hello.slots) == [HOST]
    assert f"this engine's host tier will not survive a restart: {shared} belongs to" in caplog.text
    assert "set KVBM_HOST_PERSIST_DIR to" in caplog.text
    assert list(shared.iterdir()) == []


def test_sockets_do_not_meet_in_such_a_place(tmp_path):
    shared = folder(tmp_path / "shared", 0o777)
    with pytest.raises(ChannelError, match=f"{shared} belongs to .* set TMPDIR"):
        local.Claim(shared / "kvbm" / "leader")


def test_cards_are_not_entered_in_such_a_place(tmp_path):
    registry = FileRegistry(folder(tmp_path / "shared", 0o777))
    with pytest.raises(CacheRefused, match="DYN_FILE_KV"):
        registry.enter({"kvbm/namespace/leaders/engine": b"{}"})


# -- with another user, for real --------------------------------------------------------------------------------------

EXCHANGE = """
import ctypes, os, sys
ours, theirs = map(os.fsencode, sys.argv[1:])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
rename = ctypes.CDLL(None, use_errno=True).renameat2
print("ready", flush=True)
while True:
    rename(-100, ours, -100, theirs, 2)
"""
SQUAT = """
import os, sys
path, target = sys.argv[1:]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
os.umask(0)
print("ready", flush=True)
turn = 0
while True:
    turn += 1
    try:
        if turn % 2:
            os.mkdir(path, 0o777)
            open(path + "/rank-0.slab", "wb").close()
            os.unlink(path + "/rank-0.slab")
            os.rmdir(path)
        else:
            os.symlink(target, path)
            os.unlink(path)
    except OSError:
        pass
"""


@contextmanager
def attack(code: str, *paths: Path):
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, paths)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def start(cache: Path) -> None:
    """What the start of a rank does. Fails when the file that it has opened is another user's."""
    private_directory(cache)
    file = DiskFile(slab_path(cache, 0), 1, ALIGNMENT, threads=1)
    owners = {os.fstat(fd).st_uid for fd in (file._fd, file._sums_fd)}
    file.close()
    assert owners == {os.geteuid()}


@as_root
def test_a_folder_that_its_owner_exchanges_is_never_opened(place):
    shared = folder(place / "shared", 0o755, STRANGER)
    ours, theirs = folder(shared / "kvbm-x", 0o700), folder(shared / "theirs", 0o777, STRANGER)
    for name in ("rank-0.slab", "rank-0.slab.sums"):
        (theirs / name).touch()
        os.chown(theirs / name, STRANGER, STRANGER)
        (theirs / name).chmod(0o666)
    refused = 0
    with attack(EXCHANGE, ours, theirs):
        for _ in range(400):
            with pytest.raises(CacheRefused, match=f"{shared} belongs to uid {STRANGER}"):
                start(ours)
            refused += 1
    assert refused == 400


@as_root
def test_another_user_of_tmp_gets_no_folder_opened(place):
    """The exchange fails there, but whenever the cache is gone another user can be first to take its name."""
    shared = folder(place / "shared", 0o1777)
    cache, target = shared / "kvbm-x", folder(place / "target", 0o700)
    opened = refused = 0
    with attack(SQUAT, cache, target):
        for _ in range(400):
            try:
                start(cache)
                opened += 1
                shutil.rmtree(cache)
            except OSError:
                refused += 1
    assert opened + refused == 400
    assert list(target.iterdir()) == []


@as_root
def test_an_index_is_not_opened_through_a_link_of_another_user(place):
    shared = folder(place / "shared", 0o1777)
    (shared / "way").symlink_to(folder(place / "elsewhere"))
    os.chown(shared / "way", STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(CacheRefused, match=f"`chown -h root {shared}/way`"):
        Index.open(shared / "way" / "kvbm-x", WHAT, 4)


@as_root
def test_a_user_that_may_not_create_the_directory_is_told_what_to_do(place):
    code = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from kvbm.tiers.directory import private_directory\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: private_directory(Path(sys.argv[1]))\n"
        "except OSError as error: print(error.strerror)"
    )
    source = str(Path(settings.__file__).parents[1])
    for path in (place / "kvbm-x", place / "volume" / "kvbm-x"):
        said = subprocess.run([sys.executable, "-c", code, path, source], capture_output=True, text=True).stdout
        for part in (f"{place} belongs to uid 0 (root) with mode 0755", "uid 65534", "`chown 65534", "DISK_CACHE_DIR"):
            assert part in said
