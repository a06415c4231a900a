"""Reading the files of a model repository, whatever somebody has put there.

Only regular files are read: to open a pipe would wait for somebody who writes into it, for ever. And what is read is in
memory of our own: a file that is mapped, and then overwritten in place, ends the process.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> BufferedReader:
    """Raises `OSError`, whose `strerror` says so where it is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # which waits for nobody
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "a folder")
    raise OSError(errno.EINVAL, f"it is {kind}, and must be a regular file", str(path))


def read_bytes(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Raises `OSError` or, where it is not UTF-8, `ValueError`."""
    return read_bytes(path).decode("utf-8")
