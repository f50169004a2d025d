"""`witness`: the proof that a test went the way it claims, in values read from the engine.

A test of an eviction that evicts nothing proves nothing. So a test that claims a path calls this with what the engine
itself says of it. Each call prints one line (`pytest -rP` shows it) and, where the environment names a file in
PERDURE_WITNESS, appends it there as a line of JSON, from which the rows of the matrix can be printed.
"""

from __future__ import annotations

import json
import os

Value = int | float | str | bool | list[int] | dict[str, int]


def witness(id: str, **values: Value) -> None:
    """Claim the path `id` (a case or a row), with the values that show it. Fails if one of them shows nothing.

    A number must not be 0, a text, list or table not empty, and there must be at least one value.
    """
    assert values, f"{id}: a claim without a value read from the engine"
    empty = [name for name, value in values.items() if not value]
    assert not empty, f"{id}: the path was not taken, nothing in {', '.join(empty)} of {values}"
    print(f"witness {id} " + " ".join(f"{name}={value}" for name, value in values.items()))
    if path := os.environ.get("PERDURE_WITNESS"):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"id": id, "test": test, "values": values}) + "\n")
