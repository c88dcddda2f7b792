"""Judging a posterior on the server's data: predictions of M networks, and the numbers made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import uncertainty
from .data import Examples, Transform
from .engine import predict
from .experiment import Experiment
from .posterior import Posterior

SERVER = -1  # the "client" whose mean is subtracted from the server's inputs


class Evaluator:
    """Evaluates posteriors on named splits: ``validation``, ``test`` and ``ood:NAME``.

    Called with a posterior and a round it returns one ``evaluation`` event per split. Deterministic networks are
    evaluated with one sample, all others with ``evaluation.samples``.
    """

    def __init__(
        self, model: nn.Module, splits: Mapping[str, Examples], transform: Transform, experiment: Experiment
    ) -> None:
        self.model, self.splits, self.transform, self.experiment = model, dict(splits), transform, experiment

    @property
    def samples(self) -> int:
        """Monte-Carlo samples per evaluation: 1 where the network has nothing random in it."""
        return 1 if self.experiment.model.kind == "deterministic" else self.experiment.evaluation.samples

    def probabilities(self, posterior: Posterior, split: str, round: int) -> Tensor:
        """Return class probabilities (M, N, C) of one split; the noise belongs to (seed, evaluate, round, split)."""
        e = self.experiment
        return predict(
            self.model,
            posterior,
            self.splits[split].inputs,
            self.transform,
            samples=self.samples,
            batch_size=e.evaluation.batch_size,
            draws=e.evaluation.draws,
            seed_address=(e.seed, "evaluate", round, split),
            engine=e.engine,
        )

    def __call__(self, posterior: Posterior, round: int, model: str = "global") -> list[dict[str, Any]]:
        """Return one ``evaluation`` event per split."""
        return self.events({s: self.probabilities(posterior, s, round) for s in self.splits}, round, model)

    def events(self, probabilities: Mapping[str, Tensor], round: int, model: str = "global") -> list[dict[str, Any]]:
        """Return the events for predictions already made (an ensemble's, say)."""
        found = []
        for split, p in probabilities.items():
            if split.startswith("ood:"):
                metrics = uncertainty.summarize_outliers(probabilities["test"], p)
            else:
                labels = self.splits[split].labels.cpu()
                metrics = uncertainty.summarize(p, labels, bins=self.experiment.evaluation.bins)
            found.append(
                {
                    "kind": "evaluation",
                    "round": round,
                    "split": split,
                    "model": model,
                    "samples": p.shape[0],
                    "draws": self.experiment.evaluation.draws,
                    "examples": p.shape[1],
                    "metrics": metrics,
                }
            )
            found += [{**found[-1], **part} for part in self._by_owner(split, p)]
        return found

    def _by_owner(self, split: str, p: Tensor) -> list[dict[str, Any]]:
        """Return the test metrics owner by owner (hospital, site) where the clients are natural ones."""
        partition = self.experiment.partition
        if split != "test" or partition.scheme != "column" or partition.column not in self.splits[split].columns:
            return []
        owners, labels = self.splits[split].columns[partition.column], self.splits[split].labels.cpu()
        parts = []
        for value in np.unique(owners):
            rows = torch.from_numpy(np.flatnonzero(owners == value))
            metrics = uncertainty.summarize(p[:, rows], labels[rows], bins=self.experiment.evaluation.bins)
            parts.append({"split": f"test:{value}", "examples": len(rows), "metrics": metrics})
        return parts

    def save_predictions(self, posterior: Posterior, round: int, folder: Any) -> dict[str, Tensor]:
        """Write ``predictions-SPLIT.npz`` for every split: what the report and ``--reject`` are made of."""
        made = {}
        for split, examples in self.splits.items():
            made[split] = p = self.probabilities(posterior, split, round)
            file = folder / f"predictions-{split.removeprefix('ood:')}.npz"
            with open(file, "wb") as f:
                np.savez_compressed(
                    f,
                    probabilities=p.to(torch.float32).numpy(),
                    labels=examples.labels.cpu().numpy(),
                    indices=np.arange(len(examples)),
                )
        return made
