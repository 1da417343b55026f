"""The KL coefficient of the reward where a schedule and a controller act on it together."""

from __future__ import annotations

from megappo.algorithms.kl import FixedController, make_controller


class KlCoefficient:
    """`β = base · factor`. The base is configured (and may be scheduled), the factor is the controller's own.

    All controllers multiply, so with a constant base this is the controller as published. The factor starts at 1
    and is the only state. While the base is 0 (a warm-up) the controller rests: nothing that it did could show in
    the KL, and the small KL of a young policy would only wind it down.

    Args:
        type, horizon, power: see `make_controller`. The target may change with every update.
    """

    def __init__(self, type: str, *, target_kl: float = 0.1, horizon: float = 10000, power: float = 1.5):
        self.controller: FixedController = make_controller(type, 1.0, target_kl=target_kl, horizon=horizon, power=power)

    @property
    def factor(self) -> float:
        return self.controller.value

    def value(self, base: float) -> float:
        """The coefficient in force with this base."""
        return base * self.factor

    def update(self, base: float, current_kl: float, samples: int, target_kl: float) -> float:
        """Take the mean KL measured over `samples` under `base`; returns the coefficient now in force."""
        if base > 0:
            if hasattr(self.controller, "target_kl"):
                self.controller.target_kl = target_kl
            self.controller.update(current_kl, samples)
        return self.value(base)

    def state_dict(self) -> dict[str, float]:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.controller.value = float(state["factor"])
