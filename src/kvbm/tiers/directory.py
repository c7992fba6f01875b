"""Directories that no other user of this machine can exchange, and files that no other user can have planted.

A planted block passes its checksum, so a cache is as safe as the directories above it: the owner of any of them can
put another folder in the place of the cache. The rule is that of OpenSSH's StrictModes. Every directory from / down
belongs to root or to this user, and neither its group nor others can write to it, unless it is sticky as /tmp is or
the group has this user alone. The links on the way obey it too. Only root and this user can
change the files behind a path that passes, so later calls may use the path.

A writable entry of a POSIX ACL shows in the group bits of the mode.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import hashlib
import os
import pwd
import re
import shlex
import stat
from pathlib import Path

SETTING = "DYN_KVBM_DISK_CACHE_DIR"
_HANDLE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # O_DIRECTORY also triggers automounts
_MAX_LINKS = 40  # as the kernel
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


def _overflow_uid() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_bytes())
    except (OSError, ValueError):
        return 65534


OVERFLOW_UID = _overflow_uid()


def readable_name(identity: bytes, model: object) -> str:
    """Names what belongs to a model: for people by the end of the model's name, and with a digest of ``identity``."""
    word = re.sub(r"[^a-z0-9.]+", "-", str(model).lower().rstrip("/").rsplit("/", 1)[-1]).strip("-.")
    return f"kvbm-{word[:48] or 'cache'}-{hashlib.sha256(identity).hexdigest()[:16]}"


def maps_every_user() -> bool:
    """Whether each uid here is one user. In a user namespace that maps only some, all others have OVERFLOW_UID."""
    try:
        lines = Path("/proc/self/uid_map").read_text("ascii").splitlines()
        return sum(int(line.split()[2]) for line in lines) >= 2**32 - 1
    except (OSError, ValueError, IndexError):
        return False


class CacheRefused(OSError):  # noqa: N818 - a state, not a mistake
    """The directory cannot be trusted with a cache; the text says why and what to do."""


def open_trusted(path: Path, setting: str = SETTING, *, make: bool = False) -> int:
    """A handle (``O_PATH``) of a directory that only root and this user can exchange. ``make``: create what is missing.

    Raises :class:`CacheRefused` with the directory that breaks the rule, and OSError when there is none.
    """
    here, links = Path("/"), 0
    at = os.open(here, _HANDLE)
    try:
        # The owner of / can replace this program too. In a user namespace without root that owner is the overflow user.
        owners = {0, os.geteuid(), os.fstat(at).st_uid}
        # The kernel shows every user that the namespace does not map as this one. Elsewhere it stands for root; but any
        # user can make an entry of a sticky directory.
        in_sticky = owners - ({OVERFLOW_UID} - {os.geteuid()})
        _check(here, at, owners, setting)
        left = [*reversed(path.absolute().parts[1:])]
        while left:
            name = left.pop()
            trusted = in_sticky if os.fstat(at).st_mode & stat.S_ISVTX else owners
            if (target := _link(at, name, here, trusted, setting)) is not None:
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                left += reversed(target.parts)
                continue
            if name == "/":  # a link with an absolute target
                here, following = Path("/"), os.open("/", _HANDLE)
            else:
                here = here.parent if name == ".." else here / name
                following = _enter(at, name, here, setting, make)
            os.close(at)
            at = following
            _check(here, at, owners if name in ("/", "..") else trusted, setting)
        return at
    except BaseException:
        os.close(at)
        raise


def private_directory(path: Path, setting: str = SETTING, *, make: bool = True) -> None:
    """Make a directory that only this user can enter, or make sure that an existing one is such, with its content.

    With ``make=False`` it must be there and private already. Raises as :func:`open_trusted` does.
    """
    fd = open_private(path, setting, make=make)
    try:
        if make and os.fstat(fd).st_mode & 0o077:
            os.fchmod(fd, 0o700)
        # Other users cannot add or replace files from here on. Files from before may have been planted.
        for name in os.listdir(fd):
            with contextlib.suppress(FileNotFoundError):  # another rank removes its own
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if why := distrust(found):
                    is_second_name = stat.S_ISLNK(found.st_mode) or found.st_nlink > 1
                    remove = "that file" if found.st_uid == os.geteuid() and is_second_name else "the directory"
                    raise CacheRefused(
                        errno.EPERM,
                        f"{name!r} in {path} {why}, so the content of the directory cannot be trusted. "
                        f"Look at it, then remove {remove}, or set {setting} to another one",
                    )
    finally:
        os.close(fd)


def open_private(path: Path, setting: str = SETTING, *, make: bool = False) -> int:
    """A readable handle of a directory of this user in a trusted place. Without ``make`` it must not be writable to
    other users; with it, the caller changes the mode."""
    path = path.absolute()
    above = open_trusted(path.parent, setting, make=make)
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                _make(above, path.name, path, setting, 0o700)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            found = os.stat(path.name, dir_fd=above, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise CacheRefused(
                    errno.EPERM,
                    f"{path} is not a directory of this user (uid {os.geteuid()}) but {_kind(found)} of "
                    f"{_owner(found)}, so its content cannot be trusted. Remove it, run this program as its owner, or "
                    f"set {setting} to a directory of your own",
                )
            # This user owns the entry, and no other user can replace it in its directory.
            fd = os.open(path.name, flags, dir_fd=above)
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(above)
    if not make and os.fstat(fd).st_mode & _WRITABLE:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        os.close(fd)
        raise CacheRefused(
            errno.EPERM,
            f"{path} has mode {mode:04o}: other users can write to it, so its content cannot be trusted. "
            f"Close it with `chmod 700 {shlex.quote(str(path))}`, then look for files that are not yours",
        )
    return fd


def distrust(found: os.stat_result) -> str:
    """Why an entry of a private directory, looked at without following links, may have been planted; empty when it
    cannot. Sockets and directories of this user are fine, for the directories that hold those."""
    if found.st_uid != os.geteuid():
        return f"belongs to {_owner(found)}"
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        return "has a second name (a hard link)"
    if stat.S_ISREG(found.st_mode) and found.st_mode & _WRITABLE:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}, so that other users can have written to it"
    return ""


def distrust_file(found: os.stat_result) -> str:
    """As :func:`distrust`, for what must be a regular file: reading anything else may never end."""
    return distrust(found) or ("" if stat.S_ISREG(found.st_mode) else f"is {_kind(found)}, not a regular file")


def _link(at: int, name: str, here: Path, owners: set[int], setting: str) -> Path | None:
    """The target of a link that a trusted user has made; None when the name is something else, or not there yet."""
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except OSError:
        return None  # opening it says what is wrong
    if not stat.S_ISLNK(found.st_mode):
        return None
    if found.st_uid not in owners:
        raise _refused(here / name, found, "its owner can lead the path", setting)
    return Path(os.readlink(name, dir_fd=at))


def _enter(at: int, name: str, path: Path, setting: str, make: bool) -> int:
    try:
        try:
            return os.open(name, _HANDLE, dir_fd=at)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):  # another rank was faster
            # Regardless of the umask: the next start refuses a directory that a group can write to.
            _make(at, name, path, setting, 0o755)
        return os.open(name, _HANDLE, dir_fd=at)
    except PermissionError as error:
        raise _denied(at, path, setting) from error
    except OSError as error:
        if not isinstance(error, CacheRefused):
            error.filename = str(path)
        raise


def _make(at: int, name: str, path: Path, setting: str, mode: int) -> None:
    try:
        os.mkdir(name, mode, dir_fd=at)
    except PermissionError as error:
        raise _denied(at, path, setting) from error


def _denied(at: int, path: Path, setting: str) -> CacheRefused:
    found = os.fstat(at)
    return CacheRefused(
        errno.EACCES,
        f"{path} cannot be entered or created: {path.parent} belongs to {_owner(found)} with mode "
        f"{stat.S_IMODE(found.st_mode):04o}, and this program runs as uid {os.geteuid()}. Have an administrator create "
        f"{path} and run `chown {os.geteuid()} {shlex.quote(str(path))}`, or set {setting} to a directory of your own",
    )


def _only_own_group_writes(fd: int, found: os.stat_result) -> bool:
    """Whether the writers are a group that has this user alone, as distributions with umask 002 make for each user."""
    if found.st_mode & stat.S_IWOTH or found.st_gid == 0:  # containers run arbitrary users in group 0
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    if group.gr_gid != user.pw_gid or group.gr_name != user.pw_name or {*group.gr_mem} - {user.pw_name}:
        return False
    if any(other.pw_gid == group.gr_gid and other.pw_uid != user.pw_uid for other in pwd.getpwall()):
        return False
    try:
        os.getxattr(f"/proc/self/fd/{fd}", "system.posix_acl_access")
    except OSError as error:
        return error.errno in (errno.ENODATA, errno.ENOTSUP)
    return False  # the list may let other users write, and the group bits are its mask


def _check(path: Path, fd: int, owners: set[int], setting: str) -> None:
    found = os.fstat(fd)
    if found.st_uid not in owners:
        raise _refused(path, found, "its owner can rename or replace the directories in it", setting)
    if found.st_mode & _WRITABLE and not found.st_mode & stat.S_ISVTX and not _only_own_group_writes(fd, found):
        raise _refused(path, found, "users with write access can rename or replace the directories in it", setting)


def _refused(path: Path, found: os.stat_result, why: str, setting: str) -> CacheRefused:
    where, mode = shlex.quote(str(path)), stat.S_IMODE(found.st_mode)
    if found.st_uid not in (0, os.geteuid()):
        # Not to this user: the directory may hold what other users need.
        link = "-h " if stat.S_ISLNK(found.st_mode) else ""
        todo = (
            f"Set {setting} to a directory below your home or on a local drive; or have an administrator run "
            f"`chown {link}root {where}`"
        )
    else:
        closing = "g-w" if not mode & stat.S_IWOTH else "go-w"
        todo = (
            f"Repair it with `chmod {closing} {where}` (or `chmod +t {where}`, as /tmp has it, if users share the "
            f"directory), or set {setting} to a directory that only uid {os.geteuid()} and root can change"
        )
    return CacheRefused(
        errno.EPERM,
        f"{path} belongs to {_owner(found)} with mode {mode:04o}: {why}, so a cache below it cannot be trusted. {todo}",
    )


def _owner(found: os.stat_result) -> str:
    try:
        return f"uid {found.st_uid} ({pwd.getpwuid(found.st_uid).pw_name})"
    except KeyError:
        return f"uid {found.st_uid}"


def _kind(found: os.stat_result) -> str:
    for test, name in (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISREG, "a file"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if test(found.st_mode):
            return name
    return "a device"
