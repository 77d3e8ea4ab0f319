"""What a run should have computed: its schedule played by one process, one rank after another, in plain torch."""

from types import SimpleNamespace as Named
from typing import Any

import torch

from flodl.rank.leases import Lease
from flodl.rank.order import Order
from flodl.rank.seeds import derive, plant


def reference(parts: dict[str, Any], plan: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The last committed state. records: of schedule.jsonl, in order."""
    outer, names = plan["outer"] and Named(**plan["outer"]), [n for n, _ in parts["model"]().named_parameters()]
    order = Order(plan["seed"], len(parts["data"]), plan["data"]["batch_size"], len(parts["data"]))
    ranks, sealed, thetas, velocity = {}, {}, [], {name: torch.tensor(0.0) for name in names}
    for record in records:
        rank, holder = ranks.get(record.get("rank")), (record.get("rank"), record.get("generation"))
        match record["kind"]:
            case "join":
                plant(derive(plan["seed"], "model"))
                rank = ranks[holder[0]] = Named(model=parts["model"]().train(), queue=[], step=0, snapshot=None)
                rank.optimizer = parts["optimizer"](list(rank.model.parameters()))
                rank.lr = rank.optimizer.param_groups[0]["lr"]
            case "lease":
                rank.queue += [Lease(epoch, first + i) for epoch, first, n in record["batches"] for i in range(n)]
            case "recall":
                del rank.queue[rank.queue.index(Lease(record["epoch"], record["index"])) :]
            case "seal":
                train(rank, record["step"], parts, order)
                sealed[holder] = rank.snapshot = {n: value.clone() for n, value in rank.model.state_dict().items()}
            case "attempt":
                whole = sum(c["samples"] for c in record["cohort"])
                shares = [c["samples"] / whole if len(record["cohort"]) > 1 else 1.0 for c in record["cohort"]]
                states = [sealed[c["rank"], c["generation"]] for c in record["cohort"]]
                weights = [c["weight"] for c in record["cohort"]]
            case "commit":
                thetas.append({n: mean(n, states, weights if n in names else shares) for n in states[0]})
                for n in names if outer and record["round"] > 0 else []:
                    few = whole / (len(states) * outer.min_window * order.batch_size)
                    m = torch.tensor(outer.momentum) * torch.tensor(min(few, 1.0) if outer.warm == "momentum" else 1.0)
                    g = thetas[-2][n] - thetas[-1][n]
                    velocity[n] = m * velocity[n] + g
                    thetas[-1][n] = thetas[-2][n] - torch.tensor(outer.lr) * (g + m * velocity[n])
            case "adopt":
                train(rank, record["step"], parts, order)
                for n, value in rank.model.state_dict().items():
                    theta = thetas[record["round"]][n]
                    if plan["mode"] == "cpu-async" and rank.snapshot is not None and n in names:
                        theta = torch.where(value == rank.snapshot[n], theta, theta + (value - rank.snapshot[n]))
                    value.copy_(theta)
                rank.snapshot = None
    return thetas[-1]


def train(rank: Named, step: int, parts: dict[str, Any], order: Order) -> None:
    for lease in [rank.queue.pop(0) for _ in range(step - rank.step)]:
        plant(derive(order.seed, "step", order.position(lease)))
        rank.optimizer.param_groups[0]["lr"] = rank.lr * parts["scheduler"](order.position(lease))
        rank.optimizer.zero_grad()
        items = [parts["data"][i] for i in order.indices(lease)]
        parts["loss"](rank.model, torch.utils.data.default_collate(items)).backward()
        rank.optimizer.step()
    rank.step = step


def mean(name: str, states: list[dict[str, torch.Tensor]], weights: list[float]) -> torch.Tensor:
    """Of integers the largest; of variances with those of the means; multiplied and added apart, in order of ranks."""
    values = [state[name] for state in states]
    if not values[0].is_floating_point():
        return torch.stack(values).amax(0)
    if name.endswith("running_var") and len(values) > 1:
        means = name.replace("running_var", "running_mean")
        squares = [{name + "+": state[name] + state[means] * state[means]} for state in states]
        return (mean(name + "+", squares, weights) - mean(means, states, weights) ** 2).clamp(min=0.0)
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total
