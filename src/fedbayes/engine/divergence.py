"""The KL divergence of whole rows and its gradient, in closed form.

Under ``autograd`` the KL of a network costs two dozen passes over its parameters and a graph for every tensor; on the
flat rows of the lanes it is one short run of elementwise operations. The value is that of ``objective.gaussian_kl``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def divergence(mean: Tensor, rho: Tensor, prior_mean: Tensor | float, prior_variance: Tensor) -> Tensor:
    """Return KL(q‖prior) in nats of each lane: rows (lanes, G) of means and untransformed sigmas, prior broadcast."""
    sigma = F.softplus(rho)
    deviation = prior_variance.sqrt()
    ratio, shift = sigma / deviation, (mean - prior_mean) / deviation
    return (0.5 * (ratio.square() + shift.square() - 1) - ratio.log()).sum(dim=1)


def add_kl_gradient(
    gradient: Tensor, mean: Tensor, rho: Tensor, prior_mean: Tensor | float, prior_variance: Tensor, weight: Tensor
) -> Tensor:
    """Add weight · dKL/d(mean, rho) to ``gradient`` (lanes, 2G: means, then rhos), in place, and return each lane's KL.

    ``weight`` is (lanes, 1). With sigma = softplus(rho) and v the prior's variance: dKL/dmean = (mean - m) / v and
    dKL/drho = (sigma / v - 1 / sigma) · sigmoid(rho); sigmoid(rho) / sigma stays near 1 however small sigma is. The
    value is summed term by term, from what the gradient needs anyway: good to about 1e-6 per weight, for reporting.
    """
    size = mean.shape[1]
    scale = (weight / prior_variance).expand_as(mean)
    sigma, shift = F.softplus(rho), mean - prior_mean
    value = _value(sigma, shift, prior_variance)
    gradient[:, :size].addcmul_(shift, scale)
    slope = torch.sigmoid(rho)
    gradient[:, size:].addcmul_(slope * sigma, scale).addcmul_(slope.div_(sigma), weight.expand_as(sigma), value=-1)
    return value


def _value(sigma: Tensor, shift: Tensor, prior_variance: Tensor) -> Tensor:
    """Return sum of (sigma² + shift²) / 2v - 1/2 - log(sigma / s), with one pass per term."""
    count = sigma.shape[1]
    if prior_variance.shape[1] == 1:  # one variance a lane: norms need no temporary
        norms = torch.linalg.vector_norm(sigma, dim=1).square() + torch.linalg.vector_norm(shift, dim=1).square()
        variance = prior_variance[:, 0]
        return 0.5 * (norms / variance - count + count * variance.log()) - sigma.log().sum(dim=1)
    ratio, distance = sigma.square() / prior_variance, shift.square() / prior_variance
    return 0.5 * (ratio + distance - 1 - ratio.log()).sum(dim=1)
