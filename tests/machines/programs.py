"""Programs that tests start on hosts: SLURM's, OpenSSH's and bindfs, a file system that can hang.

python -m tests.machines.programs    installs them as root on Debian, or says what to install
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "munged": "munge",
    "sshd": "openssh-server",
    "bindfs": "bindfs",
}
"""Debian's package of each program."""
FOLDERS = ("/usr/sbin", "/sbin")
MISSING = "tests over several hosts need {}: install what has them (Debian: `apt-get install {}`)"


def missing() -> list[str]:
    """Return the programs that this machine lacks."""
    folders = os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS])
    return [name for name in PACKAGES if shutil.which(name, path=folders) is None]


def install() -> None:
    """Install the programs as root on Debian; end with what to install elsewhere. No service is started."""
    if not (lacking := missing()):
        return
    packages = sorted({PACKAGES[name] for name in lacking})
    if os.geteuid() or shutil.which("apt-get") is None:
        sys.exit(MISSING.format(", ".join(lacking), " ".join(packages)))
    policy = Path("/usr/sbin/policy-rc.d")
    if added := not policy.exists():
        policy.write_text("#!/bin/sh\nexit 101\n")  # Debian's way to say so
        policy.chmod(0o755)
    try:
        variables = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", *words], check=True, stdout=subprocess.DEVNULL, env=variables)
    finally:
        if added:
            policy.unlink()


if __name__ == "__main__":
    install()
