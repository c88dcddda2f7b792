"""Evaluation: class probabilities of M draws of a network, for one posterior or several at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap

from ..data import Transform
from ..errors import ConfigError
from ..experiment import Engine
from ..nn.layers import Dropout, Variational, WeightSampling, share_masks
from ..nn.state import caller, draw
from ..posterior import Posterior
from ..seeds import derive
from .lane_layers import with_lane_layers
from .layout import StateLayout
from .members import forward_members, stacked
from .setting import on, resolve_device, starting_state
from .stacked import unvectorised

SERVER = -1
Draws = Literal["per_example", "per_pass"]

_PASSES = 5
"""Passes evaluated together on a GPU: enough to fill it, few enough for its memory."""

_kept: WeakKeyDictionary[nn.Module, dict[tuple, _Evaluator]] = WeakKeyDictionary()


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
    (``seed_address``, posterior, pass, batch). A network without noise is evaluated once and repeated. On a GPU
    several posteriors are lanes of one forward pass where the weights are all the noise there is (``per_pass``), or none.
    """
    if samples < 1 or batch_size < 1:
        raise ConfigError(
            f"predict needs at least one sample and one example per batch, not {samples} and {batch_size}."
        )
    if draws not in ("per_example", "per_pass"):
        raise ConfigError(f"draws is '{draws}'; valid are per_example and per_pass.")
    if len(inputs) == 0:
        raise ConfigError("predict was given no inputs.")
    engine = engine or Engine()
    several = not isinstance(posterior, Posterior)
    posteriors = list(posterior) if several else [posterior]  # type: ignore[arg-type]
    evaluator = _evaluator(model, engine, draws, batch_size, len(inputs))
    devices = [evaluator.device] if evaluator.device.type == "cuda" else []
    moved = transform.to(evaluator.device)
    with on(evaluator.device), torch.random.fork_rng(devices=devices):
        if several and len(posteriors) > 1 and evaluator.lanes:
            return evaluator.members(posteriors, inputs, moved, samples, tuple(seed_address))
        found = [evaluator(p, inputs, moved, samples, (*seed_address, number)) for number, p in enumerate(posteriors)]
    return torch.stack(found) if several else found[0]


class _Evaluator:
    """A network set up for evaluation: its copy, its settings, its compiled forward pass."""

    def __init__(self, model: nn.Module, engine: Engine, draws: str, batch_size: int) -> None:
        self.device = resolve_device(engine.device)
        self.engine, self.draws, self.batch_size = engine, draws, batch_size
        self.model = copy.deepcopy(model).to(self.device).eval()
        share_masks(self.model, draws == "per_pass")
        self.call = caller(self.model)
        self.layout = StateLayout.of(self.model)
        self.noisy = is_noisy(self.model)
        self.sampling = any(isinstance(m, WeightSampling) for m in self.model.modules())
        gpu = self.device.type == "cuda"
        self.together = _PASSES if gpu and self.noisy and draws == "per_example" and not self.sampling else 1
        self.compiled = (
            gpu and engine.compile and self.noisy
        )  # one pass of a quiet network is sooner done than compiled
        if self.compiled and engine.precision == "bf16":
            with_lane_layers(self.model)
        self.forward = torch.compile(self._forward, dynamic=False) if self.compiled else self._forward
        self.captured: _Captured | None = None

    @property
    def lanes(self) -> bool:
        """Whether several posteriors are lanes of one pass: on a GPU, and once weights are drawn nothing else is random.

        A CPU gains nothing: 21 members took as long as one after the other (MLP), or 1.7 to 2 times as long (ConvNet,
        ResNet-20), because grouped convolutions are slow there.
        """
        return self.device.type == "cuda" and self.lanes_possible

    @property
    def lanes_possible(self) -> bool:
        """Whether several posteriors can be lanes of one pass: their weights are all the noise there is, or there is none."""
        masks = any(
            (isinstance(m, Dropout) and m.p > 0) or getattr(m, "noisy", False) is True for m in self.model.modules()
        )
        return not self.noisy or (self.draws == "per_pass" and not masks)

    def members(
        self, posteriors: Sequence[Posterior], inputs: Tensor, transform: Transform, samples: int, address: tuple
    ) -> Tensor:
        """Return (R, M, N, C) for several posteriors, all in one forward pass; the draws are those of ``__call__``."""
        passes, states = samples if self.noisy else 1, []
        for number, posterior in enumerate(posteriors):
            state = starting_state(posterior, self.layout, self.device)
            self.layout.check(state, SERVER)
            for i in range(passes):
                if self.noisy:
                    torch.manual_seed(derive(*address, number, i, "weights"))
                states.append(draw(state) if self.noisy else state)
        p = forward_members(self.call, stacked(states), inputs, transform, SERVER, self._autocast)
        p = p.view(len(posteriors), passes, *p.shape[1:])
        return p if passes == samples else p.expand(-1, samples, -1, -1).contiguous()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.engine.precision == "bf16", cache_enabled=False
        )

    def __call__(
        self, posterior: Posterior, inputs: Tensor, transform: Transform, samples: int, address: tuple[int | str, ...]
    ) -> Tensor:
        """Return (M, N, C) for one posterior."""
        state = starting_state(posterior, self.layout, self.device)
        self.layout.check(state, SERVER)
        passes = samples if self.noisy else 1
        found: Tensor | None = None
        for first in range(0, passes, self.together):
            count = min(self.together, passes - first)
            weights = state
            if self.draws == "per_pass" and self.noisy:
                torch.manual_seed(derive(*address, first, "weights"))
                weights = draw(state)
            group: Tensor | None = None  # on the device, so that the host waits once a group and not once a batch
            for begin, p in self._batches(weights, inputs, transform, count, (*address, first)):
                if group is None:
                    group = p.new_empty(count, len(inputs), p.shape[-1])
                group[:, begin : begin + p.shape[1]] = p
            assert group is not None
            if found is None:
                found = torch.empty(passes, *group.shape[1:])
            found[first : first + count] = group.cpu()
        assert found is not None
        return found if passes == samples else found.expand(samples, -1, -1).contiguous()

    def _batches(
        self,
        state: dict[str, Tensor],
        inputs: Tensor,
        transform: Transform,
        passes: int,
        address: tuple[int | str, ...],
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (first example, probabilities (passes, batch, C)) batch by batch, to be read before the next."""
        for batch, begin in enumerate(range(0, len(inputs), self.batch_size)):
            raw = inputs[begin : begin + self.batch_size].to(self.device)
            count = len(raw)
            if self.compiled and count < self.batch_size:  # one shape, compiled once
                raw = torch.cat([raw, raw[:1].expand(self.batch_size - count, *raw.shape[1:])])
            x = transform(raw, client=SERVER)
            run = self._runner(state, x, passes)  # before the seed: compiling and capturing draw
            torch.manual_seed(derive(*address, 0 if self.draws == "per_pass" else batch))
            yield begin, run(state, x, passes)[:, :count]

    def _runner(self, state: dict[str, Tensor], x: Tensor, passes: int) -> Callable[..., Tensor]:
        """Return what evaluates a batch: a compiled pass of the usual shape is captured once and replayed."""
        if not self.compiled or passes != self.together:
            return self.forward
        if self.captured is None or self.captured.x.shape != x.shape:
            self.captured = _Captured(self.forward, state, x, passes)
        return self.captured

    def _forward(self, state: dict[str, Tensor], x: Tensor, passes: int) -> Tensor:
        """Return probabilities (passes, batch, C)."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.engine.precision == "bf16"):
            if self.sampling and self.draws == "per_example":
                logits = self._each_alone(state, x)[None]
            elif passes == 1:
                logits = self.call(state, x)[None]
            else:
                draws = torch.arange(passes, device=x.device)
                logits = vmap(lambda _: self.call(state, x), randomness="different")(draws)
        return logits.float().softmax(-1)

    def _each_alone(self, state: dict[str, Tensor], x: Tensor) -> Tensor:
        """Evaluate every example with weights of its own (direct sampling draws one per call)."""

        def one(example: Tensor) -> Tensor:
            return self.call(state, example[None])[0]

        largest = max(t.numel() for t in state.values())
        try:
            return vmap(one, randomness="different", chunk_size=max(1, 50_000_000 // largest))(x)
        except RuntimeError as error:
            if reason := unvectorised(error):
                raise ConfigError(
                    f"the network cannot draw weights for each example of a pass ({reason}); set 'evaluation.draws' to per_pass."
                ) from error
            raise


class _Captured:
    """A compiled pass of one shape in a CUDA graph: hundreds of kernels without waiting for the host between them.

    Noise is drawn anew at each replay, from the generator as it was seeded just before. The result is overwritten by
    the next replay.
    """

    def __init__(self, forward: Callable[..., Tensor], state: dict[str, Tensor], x: Tensor, passes: int) -> None:
        self.state, self.x = {n: t.clone() for n, t in state.items()}, x.clone()
        self.loaded = state
        side = torch.cuda.Stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                forward(self.state, self.x, passes)
        torch.cuda.current_stream(x.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = forward(self.state, self.x, passes)

    def __call__(self, state: dict[str, Tensor], x: Tensor, passes: int) -> Tensor:
        """Return the probabilities of a batch under a state, for the passes it was captured with."""
        if state is not self.loaded:
            for name, kept in self.state.items():
                kept.copy_(state[name])
            self.loaded = state
        self.x.copy_(x)
        self.graph.replay()
        return self.result


def _evaluator(model: nn.Module, engine: Engine, draws: str, batch_size: int, examples: int) -> _Evaluator:
    """Return an evaluator; compiled ones are kept with their network, so that evaluations compile once."""
    if not engine.compile:
        return _Evaluator(model, engine, draws, batch_size)
    key = (engine, draws, min(batch_size, examples))
    kept = _kept.setdefault(model, {})
    if key not in kept:
        kept[key] = _Evaluator(model, engine, draws, min(batch_size, examples))
    return kept[key]


def is_noisy(model: nn.Module) -> bool:
    """Whether two passes of a network in evaluation mode can differ: it has variational or MC-dropout layers.

    A module of the user's own that draws noise in evaluation mode says so with an attribute ``noisy = True``.
    """
    return any(
        isinstance(m, Variational) or (isinstance(m, Dropout) and m.p > 0) or getattr(m, "noisy", False) is True
        for m in model.modules()
    )
