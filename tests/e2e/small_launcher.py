"""Launches a run of small_rank.py: python small_launcher.py DIRECTORY '{"epochs": 3, …}' [arguments of small_rank]."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from flodl.plan import build_plan
from flodl.processes.launcher import LaunchRequest, launch

SCRIPT = str(Path(__file__).with_name("small_rank.py"))
SAMPLES = 64


def request_of(directory: Path, deeds: tuple[str, ...] = (), **settings: Any) -> LaunchRequest:
    """A run of two ranks, 16 batches of 4 samples an epoch, two epochs, unless `settings` say otherwise."""
    values: dict[str, Any] = {"mode": "cpu-cadence", "devices": ["cpu"] * 2, "batch_size": 4, "epochs": 2, "seed": 0}
    request_values: dict[str, Any] = {
        name: settings.pop(name) for name in ("command", "environment", "view", "quiet") if name in settings
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return LaunchRequest(
        plan=build_plan(**{**values, **settings}),
        dataset_length=SAMPLES,
        run="small",
        run_directory=str(directory),
        command=request_values.pop("command", (sys.executable, SCRIPT, *deeds)),
        directory=str(directory.parent),
        environment={**environment, **request_values.pop("environment", {})},
        **request_values,
    )


if __name__ == "__main__":
    result = launch(request_of(Path(sys.argv[1]), tuple(sys.argv[3:]), **json.loads(sys.argv[2])))
    print("result", json.dumps(result))
