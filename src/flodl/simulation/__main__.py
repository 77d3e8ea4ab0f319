"""Replays seeds of the soak.

`python -m flodl.simulation SEED` prints its scenario, its records and its end; `FIRST:STOP` surveys that many seeds.
"""

from __future__ import annotations

import re
import sys

from flodl.simulation.scenario import Violation
from flodl.simulation.soak import scenario, survey
from flodl.simulation.world import World


def main(arguments: list[str]) -> int:
    """0: every run kept to the rules, however it ended; 1: one did not; 2: not called with a seed or a range."""
    asked = re.fullmatch(r"(\d+)(?::(\d+))?", arguments[0]) if len(arguments) == 1 else None
    if asked is None:
        sys.stderr.write("usage: python -m flodl.simulation SEED | FIRST:STOP\n")
        return 2
    first = int(asked[1])
    return replay(first) if asked[2] is None else sweep(first, int(asked[2]))


def replay(seed: int) -> int:
    chosen = scenario(seed)
    print(chosen)
    world = World(chosen)
    try:
        outcome = world.run()
    except Violation as violation:
        print(violation)
        return 1
    for record in outcome.records:
        print(record)
    print(outcome.end)
    return 0


def sweep(first: int, stop: int) -> int:
    problems = 0
    for seed in range(first, stop):
        found = survey(seed)
        if found.problem:
            problems += 1
            print(found.problem.partition("\n")[0])
    print(f"{stop - first} seeds, {problems} with a problem; replay one by its number")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
