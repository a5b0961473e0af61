"""What pip-audit found, a line a weakness; fails if there is one, or if too few could be looked up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

# CPU builds of torch and the like have versions that no database knows.
LEAST_SHARE = 0.9


def main(report: Path) -> int:
    """The exit status."""
    packages = json.loads(report.read_text())["dependencies"]
    known = [package for package in packages if "vulns" in package]
    weak = [(package, weakness) for package in known for weakness in package["vulns"]]
    for package, weakness in weak:
        fixed = ", ".join(weakness["fix_versions"]) or "no version"
        print(f"{package['name']} {package['version']}: {weakness['id']}, mended in {fixed}")  # noqa: T201
    print(f"{len(known)} of {len(packages)} packages were looked up, {len(weak)} weaknesses")  # noqa: T201
    if len(known) < LEAST_SHARE * len(packages):
        print("error: too few: is the index of weaknesses reachable?", file=sys.stderr)  # noqa: T201
        return 2
    return int(bool(weak))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
