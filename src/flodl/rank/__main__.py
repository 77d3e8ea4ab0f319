"""`python -m flodl.rank`: a rank whose parts come from `entry=`, where the caller's script cannot be run again."""

from __future__ import annotations

import sys

from flodl.errors import PlanError
from flodl.plan import plan_from_dict, role


def main() -> None:
    """Never returns in a rank. Raises PlanError when started by hand."""
    found = role()
    if found is None or found.entry is None or found.plan is None:
        raise PlanError("python -m flodl.rank is started by a launcher only\nStart the run with Trainer(...).run().")
    sys.path[:] = [*found.sys_path, *(path for path in sys.path if path not in found.sys_path)]
    # torch is imported with the user's module, after the role is taken.
    from flodl.rank.parts import parts_from_entry
    from flodl.rank.process import run_rank

    run_rank(plan_from_dict(found.plan), parts_from_entry(found.entry), found)


if __name__ == "__main__":
    main()
