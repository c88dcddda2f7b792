"""Judging a posterior on the server's data: predictions of M networks, and the numbers made of them."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import uncertainty
from .atomic import write_atomically
from .data import Examples, Transform
from .engine import predict
from .experiment import Experiment
from .nn import load_posterior
from .posterior import Posterior
from .seeds import derive

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
            self.refreshed(posterior, round) if e.evaluation.refresh_batchnorm else posterior,
            self.splits[split].inputs,
            self.transform,
            samples=self.samples,
            batch_size=e.evaluation.batch_size,
            draws=e.evaluation.draws,
            seed_address=(e.seed, "evaluate", round, split),
            engine=e.engine,
        )

    def refreshed(self, posterior: Posterior, round: int) -> Posterior:
        """Return the posterior with batch-norm statistics measured anew on the server's data, its validation inputs.

        The average of the clients' statistics belongs to no network; one pass measures those of the fused one, under
        noise at the address (seed, refresh, round).
        """
        from .distill.student import refresh_batchnorm

        e, network = self.experiment, load_posterior(copy.deepcopy(self.model), posterior).cpu()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(e.seed, "refresh", round))
            inputs = self.splits["validation"].inputs.cpu()
            refresh_batchnorm(network, inputs, self.transform.to("cpu"), e.evaluation.batch_size)
        state = network.state_dict()
        points = {n: state[n].to(t.device) if n in state else t for n, t in posterior.points.items()}
        return Posterior(posterior.gaussians, points, posterior.metadata)

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
        values, codes = np.unique(owners, return_inverse=True)  # by number, since NaN (not known) equals nothing
        for number, value in enumerate(values):
            rows = torch.from_numpy(np.flatnonzero(codes == number))
            metrics = uncertainty.summarize(p[:, rows], labels[rows], bins=self.experiment.evaluation.bins)
            parts.append({"split": f"test:{value}", "examples": len(rows), "metrics": metrics})
        return parts

    def save_predictions(self, posterior: Posterior, round: int, folder: Any) -> dict[str, Tensor]:
        """Write ``predictions-SPLIT.npz`` for every split: what the report and ``--reject`` are made of."""
        made = {}
        for split, examples in self.splits.items():
            made[split] = p = self.probabilities(posterior, split, round)
            blob = io.BytesIO()
            np.savez_compressed(
                blob,
                probabilities=p.to(torch.float32).numpy(),
                labels=examples.labels.cpu().numpy(),
                indices=np.arange(len(examples)),
            )
            write_atomically(folder / f"predictions-{split.removeprefix('ood:')}.npz", blob.getvalue())
        return made
