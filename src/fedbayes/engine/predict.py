"""Evaluation: class probabilities of M draws of a network, for one posterior or several at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ..data import Transform
from ..errors import ConfigError
from ..experiment import Engine
from ..nn.layers import Dropout, Variational, WeightSampling, share_masks
from ..nn.state import draw
from ..posterior import Posterior
from ..seeds import derive
from .layout import StateLayout
from .setting import resolve_device, starting_state

SERVER = -1
Draws = Literal["per_example", "per_pass"]


@torch.no_grad()
def predict(
    model: nn.Module,
    posterior: Posterior | Sequence[Posterior],
    inputs: Tensor,
    transform: Transform,
    *,
    samples: int,
    batch_size: int,
    draws: Draws = "per_example",
    seed_address: Sequence[int | str] = (0, "predict"),
    engine: Engine | None = None,
) -> Tensor:
    """Return class probabilities (M, N, C), float32 on the CPU; a list of R posteriors gives (R, M, N, C).

    Each of the M = ``samples`` passes is one draw of the network's noise, in evaluation mode (batch-norm uses its running
    statistics; MC-dropout stays on). ``draws`` says what examples of a pass share: ``per_example``, nothing beyond what
    the estimator itself shares (Flipout: the size of the perturbation, not its signs); ``per_pass``, one network: the
    same weights and the same dropout mask for all examples, whatever the batch size. All noise is addressed
    (``seed_address``, posterior, pass, batch). A network without noise is evaluated once and repeated.
    """
    if samples < 1 or batch_size < 1:
        raise ConfigError(
            f"predict needs at least one sample and one example per batch, not {samples} and {batch_size}."
        )
    if draws not in ("per_example", "per_pass"):
        raise ConfigError(f"draws is '{draws}'; valid are per_example and per_pass.")
    engine = engine or Engine()
    several = not isinstance(posterior, Posterior)
    posteriors = list(posterior) if several else [posterior]  # type: ignore[arg-type]
    evaluator = _Evaluator(model, transform, engine, draws, batch_size, tuple(seed_address))
    devices = [evaluator.device] if evaluator.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        found = [evaluator(p, inputs, samples, number) for number, p in enumerate(posteriors)]
    return torch.stack(found) if several else found[0]


class _Evaluator:
    """One evaluation's network, settings and noise addresses."""

    def __init__(
        self, model: nn.Module, transform: Transform, engine: Engine, draws: str, batch_size: int,
        address: tuple[int | str, ...],
    ) -> None:  # fmt: skip
        self.device = resolve_device(engine.device)
        self.engine, self.draws, self.batch_size, self.address = engine, draws, batch_size, address
        self.model = copy.deepcopy(model).to(self.device).eval()
        share_masks(self.model, draws == "per_pass")
        self.layout = StateLayout.of(self.model)
        self.transform = transform.to(self.device)
        self.noisy = is_noisy(self.model)
        self.sampling = any(isinstance(m, WeightSampling) for m in self.model.modules())

    def __call__(self, posterior: Posterior, inputs: Tensor, samples: int, number: int) -> Tensor:
        """Return (M, N, C) for one posterior."""
        state = starting_state(posterior, self.layout, self.device)
        self.layout.check(state, -1)
        passes = samples if self.noisy else 1
        found: Tensor | None = None
        for index in range(passes):
            weights = state
            if self.draws == "per_pass" and self.noisy:
                torch.manual_seed(derive(*self.address, number, index, "weights"))
                weights = draw(state)
            for begin, p in self._batches(weights, inputs, (number, index)):
                if found is None:
                    found = torch.empty(passes, len(inputs), p.shape[-1])
                found[index, begin : begin + len(p)] = p
        if found is None:
            raise ConfigError("predict was given no inputs.")
        return found if passes == samples else found.expand(samples, -1, -1).contiguous()

    def _batches(
        self, state: dict[str, Tensor], inputs: Tensor, address: tuple[int, int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (first example, probabilities) batch by batch of one pass."""
        forward: Callable[[Tensor], Tensor] = lambda x: functional_call(self.model, state, (x,))  # noqa: E731
        if self.sampling and self.draws == "per_example":
            forward = lambda x: self._each_alone(state, x)  # noqa: E731
        for batch, begin in enumerate(range(0, len(inputs), self.batch_size)):
            place = 0 if self.draws == "per_pass" else batch
            torch.manual_seed(derive(*self.address, *address, place))
            x = self.transform(inputs[begin : begin + self.batch_size].to(self.device), client=SERVER)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.engine.precision == "bf16"):
                logits = forward(x)
            yield begin, logits.float().softmax(-1).cpu()

    def _each_alone(self, state: dict[str, Tensor], x: Tensor) -> Tensor:
        """Evaluate every example with weights of its own (direct sampling draws one per call)."""

        def one(example: Tensor) -> Tensor:
            return functional_call(self.model, state, (example[None],))[0]

        largest = max(t.numel() for t in state.values())
        return vmap(one, randomness="different", chunk_size=max(1, 50_000_000 // largest))(x)


def is_noisy(model: nn.Module) -> bool:
    """Whether two passes of a network in evaluation mode can differ: it has variational or MC-dropout layers.

    A module of the user's own that draws noise in evaluation mode says so with an attribute ``noisy = True``.
    """
    return any(
        isinstance(m, Variational) or (isinstance(m, Dropout) and m.p > 0) or getattr(m, "noisy", False) is True
        for m in model.modules()
    )
