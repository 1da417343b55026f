"""Bradley-Terry: a scalar score decides which of two responses is preferred, `p(c > r) = σ(s_c − s_r)`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megappo.algorithms.segments import widen


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center_coef: float = 0.0) -> Tensor:
    """Loss of each pair, `[pairs]`: `−log σ(s_c − s_r − margin) + center_coef · (s_c + s_r)²`.

    Args:
        margin: by how much the chosen score has to be higher (Touvron et al. 2023, Llama 2).
        center_coef: only differences matter to the first term; this one keeps scores around 0 (Eisenstein et al.
            2023).
    """
    chosen, rejected = widen(chosen), widen(rejected)
    loss = -F.logsigmoid(chosen - rejected - margin)
    return loss + center_coef * (chosen + rejected).square() if center_coef else loss


def preferred(chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 where the chosen response has the higher score, ½ where the scores are equal, else 0; fp32 `[pairs]`."""
    return ((chosen > rejected).float() + (chosen >= rejected).float()) / 2


def calibration_error(chosen: Tensor, rejected: Tensor, bins: int = 10) -> float:
    """Expected calibration error of `σ(s_c − s_r)` (Guo et al. 2017): 0 if what is 80 % sure is right 80 % of the time.

    A pair's confidence is `σ(|s_c − s_r|)`, at least ½; it is right where the chosen response has the higher score
    (equal scores: half right). `bins` equal bins over [½, 1]: `Σ share · |accuracy − mean confidence|`. 0 pairs: 0.
    """
    gap = chosen.double() - rejected.double()
    confidence = torch.sigmoid(gap.abs())
    right = preferred(chosen, rejected).double()
    place = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    sums = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, right - confidence)
    return float(sums.abs().sum() / max(1, len(gap)))
