"""The cost of a run so far, and of a point of held-out accuracy."""

from __future__ import annotations


def costs(
    *,
    flops: float,
    seconds: float,
    price: float,
    before: float | None,
    after: float | None,
) -> dict[str, float]:
    """Return the cost since the start of the run. `price` is for an hour of the device; 0: not
    known.

    `before` and `after` are held-out accuracies, of the start and the latest. What depends on the
    clock is named time/.
    """
    hours = seconds / 3600
    found = {"cost/flops": flops, "time/device_hours": hours}
    if price:
        found["time/money"] = hours * price
    points = 100 * (after - before) if before is not None and after is not None else 0.0
    if points > 0:
        found["time/device_hours_per_point"] = hours / points
        if price:
            found["time/money_per_point"] = hours * price / points
    return found
