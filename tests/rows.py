"""Prints what the last run of the tests witnessed: a line a row or case, with the values read from the engine.

python -m tests.rows
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FILE = Path(__file__).parents[1] / ".witness.jsonl"


def lines() -> list[str]:
    """One line for each id, in order, with the values of its last test and how many tests claimed it."""
    claims: dict[str, list[dict[str, object]]] = {}
    if FILE.exists():
        for line in FILE.read_text(encoding="utf-8").splitlines():
            claim = json.loads(line)
            claims.setdefault(claim["id"], []).append(claim["values"])
    return [
        f"{id_:24} {len(found):3} tests  " + " ".join(f"{name}={value}" for name, value in found[-1].items())
        for id_, found in sorted(claims.items())
    ]


def main() -> int:
    found = lines()
    if not found:
        print("no rows: run the tests first (make test)", file=sys.stderr)
        return 1
    print("\n".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
