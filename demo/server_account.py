"""The account that runs the embedded Postgres when we are root, because Postgres refuses to be.

The account gets its own directory, and the right to pass through the folders above it and above the
programs: to pass, not to list or read.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Final

from cdc.errors import OperatorError

_NAME: Final = "pgserver"


def server_account() -> str | None:
    """The account to run the server as, made if need be; nothing if we may run it ourselves."""
    if os.geteuid() != 0:
        return None
    if not _exists():
        # Two useradd at the same moment both succeed, and the account's number changes under the
        # process that saw the first. Locking the directory leaves no file behind.
        accounts = os.open("/etc", os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(accounts, fcntl.LOCK_EX)
            if not _exists():
                _create()
        finally:
            os.close(accounts)
    return _NAME


def _exists() -> bool:
    try:
        pwd.getpwnam(_NAME)
    except KeyError:
        return False
    return True


def _create() -> None:
    command = ["useradd", "--system", "--no-create-home", "--user-group", _NAME]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise OperatorError(
            f"Postgres does not run as root, and the account {_NAME} cannot be made",
            fix="run as an ordinary user",
        ) from error


def hand_over(directory: Path, account: str) -> None:
    """Make ``directory`` the account's own, and reachable for it."""
    shutil.chown(directory, account, account)
    directory.chmod(0o700)
    let_others_pass_to(directory)


def let_others_pass_to(path: Path) -> None:
    """Let every account reach what stands at ``path``, if it knows the way."""
    for folder in path.parents:
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH:
            folder.chmod(mode | stat.S_IXOTH)
