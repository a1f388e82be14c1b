"""Type-check an installed wheel, so that the checker sees every module under its real name."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FEWEST = 30  # modules of the package; fewer means that the check looked at something else


def main() -> int:
    """Build, install aside, check; the checker's exit status."""
    with tempfile.TemporaryDirectory() as place:
        wheel, site = Path(place) / "wheel", Path(place) / "site"
        pip = [sys.executable, "-m", "pip", "-q"]
        subprocess.run(
            [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheel), str(ROOT)],
            check=True,
        )
        (built,) = wheel.glob("lagraph-*.whl")
        subprocess.run(
            [*pip, "install", "--no-deps", "--target", str(site), str(built)], check=True
        )
        config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", f"{place}/cache"]
        checked = subprocess.run(
            [sys.executable, "-m", "mypy", *config, "-p", "lagraph"],
            cwd=place,
            env={"MYPYPATH": str(site), "PATH": "/usr/bin:/bin"},
            text=True,
            capture_output=True,
            check=False,
        )
    print(checked.stdout, checked.stderr, sep="")
    if checked.returncode:
        return checked.returncode
    count = re.search(r"no issues found in (\d+) source files", checked.stdout)
    if count is None or int(count[1]) < FEWEST:
        print(f"expected at least {FEWEST} modules to be checked")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
