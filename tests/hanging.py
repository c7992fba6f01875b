"""A disk that hangs, for a process of its own: a library that is loaded before libc and blocks the calls that touch a
directory for as long as a flag file is there. Needs a C compiler and no rights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# The path of a call decides, or the file behind its descriptor. The flag lies outside of the directory.
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static void hang(const char *path) {
    const char *prefix = getenv("HANGING_DISK"), *flag = getenv("HANGING_FLAG");
    if (!prefix || !flag || strncmp(path, prefix, strlen(prefix))) return;
    while (!access(flag, F_OK)) usleep(20000);
}
static void hang_fd(int fd) {
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(name, path, sizeof path - 1);
    if (size > 0) { path[size] = 0; hang(path); }
}
#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    REAL(name); hang(path); return real(path, flags, mode); }
OPEN(open) OPEN(open64)
#define FD(type, name, declared, passed) type name declared { REAL(name); hang_fd(fd); return real passed; }
FD(ssize_t, read, (int fd, void *b, size_t n), (fd, b, n))
FD(ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n))
FD(ssize_t, pread, (int fd, void *b, size_t n, off_t o), (fd, b, n, o))
FD(ssize_t, pread64, (int fd, void *b, size_t n, off64_t o), (fd, b, n, o))
FD(ssize_t, pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o))
FD(ssize_t, pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o))
FD(ssize_t, preadv, (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o))
FD(ssize_t, preadv64, (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o))
FD(ssize_t, pwritev, (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o))
FD(ssize_t, pwritev64, (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o))
FD(ssize_t, preadv2, (int fd, const struct iovec *v, int n, off_t o, int f), (fd, v, n, o, f))
FD(ssize_t, preadv64v2, (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f))
FD(ssize_t, pwritev2, (int fd, const struct iovec *v, int n, off_t o, int f), (fd, v, n, o, f))
FD(ssize_t, pwritev64v2, (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f))
FD(int, fsync, (int fd), (fd))
FD(int, fdatasync, (int fd), (fd))
FD(int, ftruncate, (int fd, off_t n), (fd, n))
FD(int, ftruncate64, (int fd, off64_t n), (fd, n))
FD(int, fallocate, (int fd, int m, off_t o, off_t n), (fd, m, o, n))
#define PATH(name, declared, passed) int name declared { REAL(name); hang(path); return real passed; }
PATH(mkdir, (const char *path, mode_t m), (path, m))
PATH(unlink, (const char *path), (path))
PATH(rename, (const char *path, const char *b), (path, b))
PATH(stat, (const char *path, struct stat *s), (path, s))
PATH(lstat, (const char *path, struct stat *s), (path, s))
"""


class HangingDisk:
    """Runs Python code whose calls to ``folder`` never return while :attr:`flag` exists. The code may make the flag
    itself: its path is in the environment as ``HANGING_FLAG``."""

    def __init__(self, folder: Path, work: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler to make a disk that hangs with")
        source, self._library = work / "hanging.c", work / "hanging.so"
        source.write_text(_SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", self._library, source, "-ldl"], check=True)
        self.folder, self.flag = folder, work / "hangs"

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "HANGING_DISK": str(self.folder), "HANGING_FLAG": str(self.flag)}

    def run(self, code: str, seconds: float = 60) -> str:
        """What the process printed on both of its streams. Fails unless it ends, by itself and well, in time."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout
