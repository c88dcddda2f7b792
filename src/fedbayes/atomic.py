"""Writing a file whole or not at all, and saying in one sentence why it could not be written."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from .errors import RunError


def write_atomically(path: Path, blob: bytes) -> None:
    """Write a file so that a reader, or a crash at any moment, sees the old content or the new, never a torn one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(partial, "wb") as f:
            f.write(blob)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            partial.unlink(missing_ok=True)
        raise not_written(path, error) from None


def not_written(path: Path, error: OSError) -> RunError:
    """Return the sentence for a file that could not be written: a full disk, a missing right, a folder that is none."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        what = (
            "this process may write no larger files (ulimit -f)" if error.errno == errno.EFBIG else "the disk is full"
        )
        return RunError(
            f"{path}: {what}; the previous version of this file is whole. Free some space and continue with --resume."
        )
    return RunError(f"{path} cannot be written ({error.strerror or error}); choose another place or mend this one.")
