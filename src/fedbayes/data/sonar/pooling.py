"""From segments to recordings: one prediction per recording, with its uncertainty, and who was taken for whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ... import uncertainty
from ...errors import DataError


@dataclass(frozen=True, eq=False)
class Pooled:
    """Predictions for whole recordings.

    ``probabilities`` is (M, R, C); ``index`` says for each segment which recording it belongs to; ``disagreement`` is
    how far a recording's segments differ from each other (trace of the covariance of their mean predictions);
    ``values`` holds everything of ``uncertainty.per_example``, per recording.
    """

    names: np.ndarray
    probabilities: Tensor
    labels: Tensor | None
    segments: np.ndarray
    index: np.ndarray
    disagreement: Tensor
    values: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def correct(self) -> Tensor:
        """Whether each recording's class was found."""
        if self.labels is None:
            raise DataError("these recordings were pooled without their labels.")
        return self.values["prediction"] == self.labels

    @property
    def accuracy(self) -> float:
        """Share of the recordings whose class was found."""
        return float(self.correct.double().mean())

    def retained(self, by: str = "entropy") -> uncertainty.Curve:
        """Return accuracy against the share of recordings kept, the least sure (by ``by``) given away first."""
        return uncertainty.retained_curve(self.values[by], self.correct)

    def order(self, by: str = "entropy") -> np.ndarray:
        """Return the recordings' numbers, least sure first: the operator's queue."""
        return np.argsort(-self.values[by].cpu().numpy(), kind="stable")


def pool(
    probabilities: Tensor,
    recordings: np.ndarray,
    labels: Tensor | None = None,
    *,
    method: str = "mean",
    shared_draws: bool = True,
) -> Pooled:
    """Pool the predictions (M, N, C) of segments into one per recording.

    ``mean`` averages the segments' probabilities within each of the M networks: segments of one recording repeat the
    same ship in the same water, so multiplying them as if independent (``product``: the normalised geometric mean,
    sharper, and right for segments that err independently) counts one piece of evidence many times.

    ``shared_draws`` says whether a network was drawn once per pass for all segments (``draws = "per_pass"``): then the
    spread over the M pooled predictions is the recording's epistemic uncertainty. With noise of its own for every
    segment it would average away, so the mean over the segments is reported instead. A recording in which two classes
    are heard counts once for each.
    """
    p = torch.as_tensor(probabilities).double()
    if p.ndim != 3 or p.shape[1] != len(recordings):
        raise DataError(
            f"pooling needs predictions (M, {len(recordings)}, C) for {len(recordings)} segments, not {tuple(p.shape)}."
        )
    keys = np.asarray(recordings).astype(str)
    if labels is not None:
        keys = np.char.add(np.char.add(keys, "\x00"), labels.cpu().numpy().astype(str))
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    index = index.reshape(-1)
    counts = torch.from_numpy(np.bincount(index)).to(p)
    where = torch.from_numpy(index).to(p.device)
    pooled = _pooled(p, where, counts, method)
    values = uncertainty.per_example(pooled)
    if not shared_draws:
        single = uncertainty.per_example(p)
        for name in ("aleatoric", "epistemic", "mutual_information", "predictive_variance"):
            values[name] = _mean(single[name].to(p)[None, :, None], where, counts)[0, :, 0]
    centre = p.mean(0)
    spread = (centre - _mean(centre[None], where, counts)[0][where]).square().sum(-1)
    return Pooled(
        names=np.asarray(recordings).astype(str)[first],
        probabilities=pooled,
        labels=None if labels is None else labels.cpu()[torch.from_numpy(first)],
        segments=np.bincount(index),
        index=index,
        disagreement=_mean(spread[None, :, None], where, counts)[0, :, 0],
        values=values,
    )


def _mean(values: Tensor, where: Tensor, counts: Tensor) -> Tensor:
    """Average (M, N, C) over the segments of each recording: (M, R, C)."""
    total = torch.zeros(values.shape[0], len(counts), values.shape[2], dtype=values.dtype, device=values.device)
    return total.index_add(1, where, values) / counts[:, None]


def _pooled(p: Tensor, where: Tensor, counts: Tensor, method: str) -> Tensor:
    if method == "mean":
        return _mean(p, where, counts)
    if method == "product":
        return _mean(p.clamp(min=1e-12).log(), where, counts).softmax(-1)
    raise DataError(f"pooling '{method}' does not exist; valid are: mean, product.")


def confusion(prediction: Tensor, labels: Tensor, classes: int) -> np.ndarray:
    """Return the confusion matrix (classes, classes) of counts: rows are what was there, columns what was said."""
    flat = torch.as_tensor(labels).cpu() * classes + torch.as_tensor(prediction).cpu()
    return torch.bincount(flat, minlength=classes * classes).reshape(classes, classes).numpy()
