"""From a checkpoint to what the controller goes on from."""

from __future__ import annotations

import math

from flodl.checkpoint.resume import Checkpoint
from flodl.plan import Plan
from flodl.protocol.settings import Beginning


def beginning_of(checkpoint: Checkpoint, plan: Plan) -> Beginning:
    """Speeds are taken over for ranks on the device that they had."""
    document = checkpoint.document
    devices = plan.cluster.devices
    ms = {
        rank.rank: rank.ms_per_batch
        for rank in document.ranks
        if rank.ms_per_batch is not None and rank.rank < len(devices) and devices[rank.rank] == rank.device
    }
    return Beginning(
        path=str(checkpoint.path),
        round=document.round,
        layout=document.layout,
        data=document.data,
        contributed=document.contributed,
        quarantined=document.quarantined,
        epochs=tuple(
            (
                math.nan if epoch.loss_sum is None else epoch.loss_sum,
                epoch.samples,
                epoch.round,
                {name: math.nan if value is None else value for name, value in epoch.metrics.items()},
            )
            for epoch in document.epochs[: plan.data.epochs]
        ),
        anchor=document.anchor if ms else plan.cadence.anchor,
        ms=ms,
    )
