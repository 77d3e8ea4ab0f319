"""The peer of a round: torch.distributed's gloo summing one flat vector between processes of one host.

`python -m flodl.bench.peer_gloo STORE RANK WORLD COUNT ROUNDS` is one of the processes; rank 0 prints its seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flodl.errors import FlodlError
from flodl.plan import sources

WARM_UP = 2
_LIMIT_S = 900.0
_SETTINGS = {"GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""gloo at its best on few cores: its processes must not spin against each other."""


def measure_gloo(count: int, world: int, rounds: int) -> list[float]:
    """Seconds of each round after the warm-up, the slowest process's: scale by the weight, all-reduce, fp32.

    Raises FlodlError with what a process said when none of them gave a figure.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "flodl.bench.peer_gloo", str(Path(folder) / "store")]
        environment = {**sources.started().environment, **_SETTINGS}
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world), str(count), str(rounds)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            said = [rank.communicate(timeout=_LIMIT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    # gloo's teardown aborts now and then after all is done, so that the figure counts and not the exit code.
    for line in said[0].splitlines():
        if line.startswith("["):
            return [float(seconds) for seconds in json.loads(line)]
    raise FlodlError(f"gloo gave no figure for {world} processes\n{' '.join(said)[-2000:]}")


def main(store: str, rank: int, world: int, count: int, rounds: int) -> None:
    """One process of the peer."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    values = torch.full((count,), 0.5 + rank)
    weight = 1.0 / world
    times = []
    for _ in range(WARM_UP + rounds):
        distributed.barrier()
        started = time.perf_counter()
        values.mul_(weight)
        distributed.all_reduce(values)
        slowest = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
        times.append(float(slowest))
    mean = sum(0.5 + k for k in range(world)) / world
    assert bool(torch.allclose(values[:: max(1, count // 1000)], torch.tensor(mean))), "gloo gave a wrong mean"
    if rank == 0:
        print(json.dumps(times[WARM_UP:]), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
