"""The account of the embedded Postgres is made once, however many processes need it at once."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

import pytest

PROGRAM = """
import pwd, sys
from demo import server_account
server_account._NAME = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
server_account.server_account()
print(pwd.getpwnam(sys.argv[1]).pw_uid)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs the account")
def test_processes_that_start_together_get_the_same_account() -> None:
    name = f"walbrook-{secrets.token_hex(4)}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        numbers = {process.communicate(timeout=30)[0] for process in processes}
        assert [process.returncode for process in processes] == [0, 0, 0, 0]
        assert len(numbers) == 1
    finally:
        for process in processes:
            process.kill()
        subprocess.run(["userdel", name], check=False, capture_output=True)
