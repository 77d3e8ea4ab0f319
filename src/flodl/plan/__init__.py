"""What a run is to do, as frozen plain values. Needs neither torch nor numpy."""

from flodl.plan.averaging import AveragingPlan
from flodl.plan.build import Settings, build_plan, setting_names
from flodl.plan.cadence import CadencePlan
from flodl.plan.checkpoint import CheckpointPlan
from flodl.plan.cluster import ClusterPlan
from flodl.plan.data import DataPlan, LoaderPlan
from flodl.plan.device import Device, parse_device
from flodl.plan.outer import DiLoCo, OuterPlan, SlowMo
from flodl.plan.plan import Plan, differences, plan_from_dict, plan_to_dict
from flodl.plan.sources import Inside, Role, Started, inside, role, started
from flodl.plan.training import TrainingPlan

__all__ = [
    "AveragingPlan",
    "CadencePlan",
    "CheckpointPlan",
    "ClusterPlan",
    "DataPlan",
    "Device",
    "DiLoCo",
    "Inside",
    "LoaderPlan",
    "OuterPlan",
    "Plan",
    "Role",
    "Settings",
    "SlowMo",
    "Started",
    "TrainingPlan",
    "build_plan",
    "differences",
    "inside",
    "parse_device",
    "plan_from_dict",
    "plan_to_dict",
    "role",
    "setting_names",
    "started",
]
