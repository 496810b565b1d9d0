"""Entry point of the installed command, which works where dependencies are missing: it says which, and its version."""

from __future__ import annotations

import sys

from hybridengine import __version__


def main() -> int:
    """Run `hybridengine.cli.main`; without a dependency that it imports, return 2, or 0 for `--version`."""
    try:
        from hybridengine.cli.main import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "hybridengine":
            raise
        if sys.argv[1:] == ["--version"]:
            print(f"hybridengine {__version__}")
            return 0
        print(
            f"hybridengine: the package {error.name} is not installed in {sys.prefix}; install the lock of this project"
            " there (pip install --no-deps -r requirements/cpu.lock.txt), or hybridengine with its dependencies",
            file=sys.stderr,
        )
        return 2
    return run()
