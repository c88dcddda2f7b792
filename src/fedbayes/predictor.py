"""Using a finished run: ``fedbayes.load(RUN)`` gives a ``Predictor`` that answers and says how sure it is.

Whoever predicts has no training data, so a run directory carries what prediction needs: ``predictor.json`` (classes,
shape and type of an input) and ``transform.safetensors`` (scale and shift of the server's inputs), written by
``save_card`` when the run starts, beside the posterior and ``config.toml``.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from . import config, uncertainty
from .data import Dataset, Transform
from .data.arrays import as_float, read_npz
from .engine import predict, resolve_device
from .errors import ConfigError, DataError, FedBayesError, PosteriorError, RunError
from .experiment import Experiment
from .numeric import as_numbers
from .posterior import Posterior
from .rundir import reading, write_atomically

if TYPE_CHECKING:
    from .predict_sound import Heard

CARD, TRANSFORM = "predictor.json", "transform.safetensors"


def save_card(
    folder: str | Path, experiment: Experiment, dataset: Dataset, transform: Transform, model: nn.Module
) -> None:
    """Write into a run directory what prediction needs beside the posterior.

    Only the server's row of the transform is kept: the clients' own means (``data.mean = "client"``) are theirs.
    """
    folder = Path(folder)
    write_atomically(folder / CARD, json.dumps(card_of(dataset, model), indent=1).encode())
    tensors = {"scale": transform.scale, "shift": transform.shift[-1:]}
    blob = save({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()})
    write_atomically(folder / TRANSFORM, blob)


def card_of(dataset: Dataset, model: nn.Module) -> dict[str, Any]:
    """Return what a predictor must know beside experiment, posterior and transform."""
    return {
        "schema": 1,
        "data": dataset.name,
        "classes": list(dataset.classes),
        "input_shape": list(dataset.input_shape),
        "input_type": str(dataset.train.inputs.dtype).removeprefix("torch."),
        "network": f"{type(model).__module__}.{type(model).__qualname__}",
    }


@dataclass(frozen=True, eq=False)
class Prediction:
    """Answers for N inputs and how sure each is.

    ``samples`` are the class probabilities of the M sampled networks (M, N, C), ``classes`` the names. The other
    values follow from them, unless ``values`` gives them (those of pooled segments); ``uncertainty`` in the plain sense is ``entropy``, ``epistemic`` the part that more
    training data could remove, ``aleatoric`` the part they could not.
    """

    samples: Tensor
    classes: tuple[str, ...]
    values: Mapping[str, Tensor] | None = None

    @cached_property
    def _values(self) -> Mapping[str, Tensor]:
        return uncertainty.per_example(self.samples) if self.values is None else self.values

    @cached_property
    def probabilities(self) -> Tensor:
        """Mean prediction (N, C)."""
        return uncertainty.predictive_mean(self.samples)

    @property
    def prediction(self) -> Tensor:
        """Number of the answered class, (N,)."""
        return self._values["prediction"]

    @property
    def names(self) -> list[str]:
        """Name of the answered class of each input."""
        return [self.classes[i] for i in self.prediction.tolist()]

    @property
    def confidence(self) -> Tensor:
        """Probability of the answered class, (N,)."""
        return self._values["confidence"]

    @property
    def entropy(self) -> Tensor:
        """Normalised predictive entropy, 0 (sure) to 1 (no idea), (N,)."""
        return self._values["entropy"]

    @property
    def aleatoric(self) -> Tensor:
        """Trace of Kwon's aleatoric covariance, (N,)."""
        return self._values["aleatoric"]

    @property
    def epistemic(self) -> Tensor:
        """Trace of Kwon's epistemic covariance, (N,)."""
        return self._values["epistemic"]

    @property
    def mutual_information(self) -> Tensor:
        """Mutual information between answer and weights in nats, (N,)."""
        return self._values["mutual_information"]

    def __len__(self) -> int:
        return self.samples.shape[1]

    def rejected(self, share: float, by: str = "entropy") -> Tensor:
        """Mark the given share of least sure inputs (for a human), (N,) of truth values.

        The nearest whole number of inputs is marked; of equally unsure ones the later are marked first.
        """
        check_rejection(share, by)
        count = int(share * len(self) + 0.5)
        order = torch.argsort(uncertainty.ranking_scores(self._values)[by], stable=True)
        marked = torch.zeros(len(self), dtype=torch.bool)
        marked[order[len(self) - count :]] = True
        return marked


def check_rejection(share: float, by: str) -> None:
    """Refuse a share or an uncertainty by which no inputs can be set aside."""
    if not isinstance(share, Real) or not 0 <= share < 1:
        raise ConfigError(f"the share to reject is {share!r}; it must be a number of at least 0 and below 1.")
    if by not in uncertainty.UNCERTAINTIES:
        raise ConfigError(f"'{by}' is no uncertainty; valid are: {', '.join(uncertainty.UNCERTAINTIES)}.")


class Predictor:
    """A trained posterior ready to answer. Made by ``fedbayes.load(RUN)``; call it with inputs.

    ``classes`` and ``input_shape`` say what it knows and takes, ``experiment`` how it was trained.
    """

    def __init__(
        self, experiment: Experiment, posterior: Posterior, network: nn.Module, transform: Transform,
        card: dict[str, Any], device: str = "auto", folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.experiment, self.posterior, self.network, self.transform = experiment, posterior, network, transform
        self.classes = tuple(card["classes"])
        self.input_shape = tuple(card["input_shape"])
        self.input_type: torch.dtype = getattr(torch, card["input_type"])
        self.folder = folder
        self._engine = dataclasses.replace(experiment.engine, device=device, compile=False)

    def __call__(
        self, inputs: Any, samples: int | None = None, batch_size: int | None = None, seed: int = 0
    ) -> Prediction:
        """Predict for a batch of raw inputs (tensor or array), as they were before any scaling.

        Images are (N, C, H, W), (N, H, W, C) or, of one channel, (N, H, W); one single input may be given without
        its leading axis. ``samples`` networks are drawn (default: as in the run's evaluation; always 1 for a
        deterministic network). The same seed gives the same answers.
        """
        for name, value in (("samples", samples), ("batch_size", batch_size), ("seed", seed)):
            if value is not None and not isinstance(value, Integral):
                raise ConfigError(f"{name} is {value!r}; a whole number is needed.")
        raw = self.inputs(inputs)
        if self.experiment.model.kind == "deterministic":
            samples = 1
        e = self.experiment.evaluation
        drawn = predict(
            self.network, self.posterior, raw, self.transform,
            samples=e.samples if samples is None else samples, batch_size=batch_size or e.batch_size,
            draws=e.draws, seed_address=(seed, "predict"), engine=self._engine,
        )  # fmt: skip
        return Prediction(drawn, self.classes)

    def listen(self, path: str | Path, samples: int | None = None, seed: int = 0) -> Heard:
        """Answer for recordings, a sound file or a folder of some, one answer each: for runs trained on recordings."""
        from .predict_sound import listen

        return listen(self, path, samples, seed)

    def inputs(self, inputs: Any) -> Tensor:
        """Return inputs as the network's stored form (N, *input_shape), or say why they cannot be."""
        x = _arranged(as_numbers(inputs, "inputs", DataError), self.input_shape)
        if len(x) == 0:
            raise DataError("there are no inputs to predict for.")
        if self.input_type != torch.uint8 or x.is_complex():
            return as_float(x, "inputs").to(self.input_type)
        return x if x.dtype == torch.uint8 else _as_bytes(x)

    def expected_accuracy(self, reject: float = 0.0, by: str = "entropy") -> tuple[float, float, int] | None:
        """Accuracy to expect on what is not rejected, its standard error (Wilson's), and the number of examples it is from.

        Measured on the run's validation predictions with the same share set aside by the same uncertainty; None where the run had
        no validation set. For the model of the best round this is slightly rosy: that round was chosen on these data.
        """
        check_rejection(reject, by)
        file = (self.folder or Path()) / "predictions-validation.npz"
        if self.folder is None or not file.exists():
            return None
        with reading(file):
            stored = read_npz(file)
            p, labels = torch.as_tensor(stored["probabilities"]), torch.as_tensor(stored["labels"])
            values = uncertainty.per_example(p)
        scores = uncertainty.ranking_scores(values)[by]
        accuracy = uncertainty.accuracy_at(scores, values["prediction"] == labels, 1 - reject)
        kept = max(1, round((1 - reject) * len(labels)))
        low, high = interval(accuracy, kept, 1)
        return accuracy, (high - low) / 2, kept


def interval(share: float, count: int, deviations: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share of ``count`` examples (1927): unlike the plain one, all right is no certainty."""
    spread = deviations**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = (share * (1 - share) * spread + spread**2 / 4) ** 0.5 / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def load(
    run: str | Path, model: Literal["best", "final"] = "best", device: str = "auto", network: nn.Module | None = None
) -> Predictor:
    """Load a run directory's posterior for prediction.

    ``model``: of the best round on validation data, or the final one. ``device``: cpu, cuda, cuda:1 or auto.
    ``network``: your own module, when the run was given one that its configuration does not name.
    """
    folder = Path(run)
    if model not in ("best", "final"):
        what = f"'{model}'" if isinstance(model, str) else f"of type {type(model).__name__}"
        raise ConfigError(f"model is {what}; valid are best and final. A network of your own is network=...")
    resolve_device(device)
    if not (folder / CARD).exists():
        what = (
            "is not there"
            if not folder.exists()
            else f"has no {CARD}: it is no run directory, or its run never started"
        )
        raise RunError(f"{folder} {what}; name a directory that fedbayes run has written.")
    with reading(folder / CARD):
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
        missing = {"classes", "input_shape", "input_type"} - card.keys()
        if missing:
            raise RunError(f"{folder / CARD} lacks '{min(missing)}'")
    file = folder / f"{model}.safetensors"
    if not file.exists():
        raise RunError(f"{folder} has no {file.name} yet: the run has not come to its end; continue it with --resume.")
    experiment = _experiment(folder / "config.toml")
    posterior = Posterior.load(file)
    with reading(folder / TRANSFORM), safe_open(str(folder / TRANSFORM), framework="pt") as f:
        transform = Transform(f.get_tensor("scale"), f.get_tensor("shift"))
    return Predictor(
        experiment, posterior, _network(experiment, posterior, card, network), transform, card, device, folder
    )


def _experiment(file: Path) -> Experiment:
    """Read the run's configuration. It was written whole: what a cut one lacks must not become the default."""
    with reading(file):
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        lacking = [s for s in config.sections() if s not in table]
        if lacking:
            raise RunError(f"it has no section [{lacking[0]}]")
    return config.read(file)


def _network(experiment: Experiment, posterior: Posterior, card: dict[str, Any], given: nn.Module | None) -> nn.Module:
    """Return the network the posterior belongs to: the one given, or the one the configuration names."""
    from .nn import load_posterior
    from .setup import build_network

    hint = f"The run was trained with {card.get('network', 'a network of its own')}: give it with fedbayes.load(run, network=...)."
    if given is None and experiment.model.name.startswith("python:"):
        raise FedBayesError(hint)
    try:
        built = (
            given if given is not None else build_network(experiment, len(card["classes"]), tuple(card["input_shape"]))
        )
    except ConfigError as error:  # a module of the user's own, say, that is not found from here
        raise FedBayesError(f"the run's network cannot be built: {error} {hint}") from None
    try:
        return load_posterior(built, _without_moments(posterior, built))
    except (PosteriorError, ConfigError) as error:
        words = f"the posterior does not fit the network '{experiment.model.name}': {error}"
        raise FedBayesError(words if given is not None else f"{words} {hint}") from None


def _without_moments(posterior: Posterior, network: nn.Module) -> Posterior:
    """Return the posterior with Gaussians that the network has no sigma for as points: the means are its weights.

    Precision weighting (Reyes 2021) sends Adam's second moments as variances of point models.
    """
    names = dict(network.named_parameters())
    points = {n: g.mean for n, g in posterior.gaussians.items() if n + "_rho" not in names and n in names}
    gaussians = {n: g for n, g in posterior.gaussians.items() if n not in points}
    return Posterior(gaussians, {**posterior.points, **points}, posterior.metadata)


def _arranged(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Bring inputs to (N, *shape): a leading axis for a single one, channels first."""

    def fits(t: Tensor) -> Tensor | None:
        if t.shape[1:] == shape:
            return t
        if len(shape) == 3 and t.ndim == 4 and tuple(t.shape[1:]) == (*shape[1:], shape[0]):
            return t.permute(0, 3, 1, 2).contiguous()
        if len(shape) >= 2 and shape[0] == 1 and t.shape[1:] == shape[1:]:
            return t[:, None]
        return None

    for candidate in (x, x[None]):
        found = fits(candidate)
        if found is not None:
            return found
    raise DataError(f"inputs have shape {tuple(x.shape)}; the network takes (N, {', '.join(map(str, shape))}).")


def _as_bytes(x: Tensor) -> Tensor:
    """Whole numbers 0..255 of another type are images all the same; anything else is refused, not guessed at."""
    x = x.to(torch.float64)
    if not bool(((x >= 0) & (x <= 255) & (x == x.round())).all()):
        found = "between 0 and 1" if bool(((x >= 0) & (x <= 1)).all()) else "not whole numbers 0..255"
        raise DataError(
            f"inputs are {found}, but the network was trained on 8-bit images (0..255) and scales them itself: give the "
            "raw images."
        )
    if 0 < float(x.max()) <= 1:
        raise DataError("no input is above 1, but the network was trained on images of 0..255: give the raw images.")
    return x.to(torch.uint8)


def predict_command(arguments: Sequence[str]) -> int:
    """Run ``fedbayes predict ARGUMENTS`` (see ``predict_files``)."""
    from .predict_files import command

    return command(arguments)
