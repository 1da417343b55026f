"""REBEL: regress the difference of log-ratios of two responses on the difference of their rewards."""

import torch
from torch import Tensor


def rebel_coefficients(log_ratios: Tensor, rewards: Tensor, groups: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Gradient of the REBEL objective with respect to each response's log-ratio, and its value.

    With `s_i = log π(y_i) − log π_old(y_i)` summed over the response and `u_i = s_i/η − r_i`, REBEL (arXiv:2404.16767,
    equation 1) minimises `(u_i − u_j)²` over pairs of responses to one prompt. Half of its mean over the pairs of a
    group of m responses is the sample variance of u, so with n responses in all

        L = 1/n Σ_groups m · var(u),        dL/ds_i = c_i/n,   c_i = 2m (u_i − mean(u)) / ((m − 1) η).

    The coefficient depends on the other responses through one number only, which is why a group need not share a
    micro-batch: compute it first, then train on the token-local loss `c_i · Σ_t l_t`.

    Args:
        log_ratios, rewards: `[n]`, the trained responses of a mini-batch.
        groups: int64 `[n]`, the prompt of each.
        eta: size of a step, > 0: the difference of log-ratios aimed at is η (r_i − r_j).

    Returns:
        `c` float64 `[n]`, 0 for a response without a partner, and `m · var(u)` spread over the group's responses:
        float64 `[n]`, whose mean is L.
    """
    if not eta > 0:
        raise ValueError(f"eta is {eta}: it must be positive")
    u = log_ratios.double() / eta - rewards.double()
    _, place, m = torch.unique(groups, return_inverse=True, return_counts=True)
    m = m[place].double()
    mean = torch.zeros(int(place.max()) + 1 if len(place) else 0, dtype=torch.float64).index_add_(0, place, u)
    centred = torch.where(m > 1, u - mean[place] / m, 0.0)
    others = (m - 1).clamp(min=1)
    return 2 * m * centred / (others * eta), m * centred.square() / others
