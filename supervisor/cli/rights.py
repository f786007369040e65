"""Who may drain nodes in Slurm, for `unbroken check --slurm rights`: by what Slurm itself says of this user.

Tried on 22.05.8 with slurmdbd: root, SlurmUser and AdminLevel=Administrator may; Operator may not.
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from typing import Final, NamedTuple

COMMAND_S: Final = 10.0
_SLURM_USER: Final = re.compile(r"^SlurmUser\s*=\s*([^\s(]+)\((\d+)\)", re.M)


class Rights(NamedTuple):
    may_drain: bool
    why: str


def judge(uid: int, config: str, admin_level: str) -> Rights:
    """`config`: of `scontrol show config`. `admin_level`: as sacctmgr has it, empty where there is no accounting."""
    if uid == 0:
        return Rights(True, "root may drain nodes")
    slurm_user = _SLURM_USER.search(config)
    if slurm_user is not None and int(slurm_user[2]) == uid:
        return Rights(True, f"{slurm_user[1]} is SlurmUser and may drain nodes")
    if admin_level == "Administrator":
        return Rights(True, "AdminLevel=Administrator may drain nodes")
    level = f"AdminLevel={admin_level}" if admin_level else "an ordinary user"
    return Rights(False, f"{level} may not drain nodes: root, SlurmUser and AdminLevel=Administrator may")


def request_folder(path: str) -> str:
    """Whether jobs of users who may not can leave requests for root's programs here, in words."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return f"there is no folder {path} on this node: root's programs are not asked (docs/slurm.md#rights)"
    except OSError as error:
        return f"{path}: {error.strerror}"
    if found.st_uid != 0 or not os.access(path, os.W_OK | os.X_OK):
        return f"{path} cannot be used: it must be root's, with mode 1733"
    return f"jobs leave requests for root's programs in {path} (unbroken drain-requests)"


def rights(folder: str) -> tuple[Rights, str]:
    """Of this user, and whether requests can be left. Ends within some 20 s."""
    uid = os.getuid()
    config = _ask("scontrol", "show", "config") if uid else ""
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = ""
    level = (
        _ask("sacctmgr", "--noheader", "--parsable2", "show", "user", user, "format=AdminLevel") if user and uid else ""
    )
    return judge(uid, config, level.strip().partition("\n")[0]), request_folder(folder)


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
