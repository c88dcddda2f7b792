"""The plain loop: one client after another, an ordinary module, torch's own optimiser.

It is the reference that lanes must agree with, and what a federated node runs: on the CPU it gives the same bits in
whatever process it runs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ..nn.state import state_of, to_posterior
from ..objective import Terms, cross_entropy, gaussian_kl, make_terms, penalty, sampled_logits
from ..seeds import derive
from .optimizers import Rates, corrected_second_moment, second_half
from .plan import Batches
from .setting import Job, Outcome, Setting, starting_state, with_moment
from .stepping import Stepper

_STRETCH = 2**18  # network inputs made ahead in one go, in numbers: few enough for a processor's cache


class PlainLoop:
    """Trains jobs one after another on one working copy of the network."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.format = memory_format(setting)
        self.model = copy.deepcopy(setting.model).to(setting.device).train()
        self.model.to(memory_format=self.format)  # type: ignore[call-overload] - the stubs know it beside a device alone
        self.parameters: dict[str, nn.Parameter] = {
            n: p for n, p in self.model.named_parameters() if p.requires_grad
        }  # fmt: skip

    def train(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Train each job from its own start."""
        for job in jobs:
            devices = [self.setting.device] if self.setting.device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices):
                outcome = self._train(job, job.batches(self.setting))
            yield outcome

    def _train(self, job: Job, batches: Batches) -> Outcome:
        s, a = self.setting, job.assignment
        start = starting_state(a.start, s.layout, s.device)
        s.layout.check(start, a.client)
        with torch.no_grad():
            for name, tensor in state_of(self.model).items():
                tensor.copy_(start[name])
        terms = make_terms(a, {n: start[n] for n in s.layout.trained.names})
        optimizer = Stepper(s.local, self.parameters, Rates.of(s.local, a.learning_rate))
        if job.memory is not None:
            optimizer.recall(job.memory, s.layout.trained)
        torch.manual_seed(derive(a.seed, "noise", a.round, a.client))
        moment = _MomentMean(s, self.parameters) if s.capture.enabled else None
        losses, first = [], second_half(batches.steps, batches.tail)
        for step, (x, y, real) in enumerate(self._batches(batches, s.site(a))):
            losses.append(self._step(optimizer, x, y, real, terms))
            if moment is not None and step >= first:
                moment.add(optimizer)
        with torch.no_grad():
            posterior = to_posterior({n: t.contiguous() for n, t in state_of(self.model).items()})
            divergence = float(gaussian_kl(self.parameters, terms.prior_mean, terms.prior_variance))
        return Outcome(
            job,
            posterior if moment is None else with_moment(posterior, moment.mean()),
            torch.stack(losses).double().cpu().numpy(),
            divergence,
            batches,
            optimizer.remember(s.layout.trained) if s.local.keep_state else None,
        )

    def _batches(self, batches: Batches, client: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield inputs, labels and weights step by step, made a stretch of steps at a time."""
        s = self.setting
        indices, real = s.to_device(batches.indices), s.to_device(batches.real)
        augmentation = {key: s.to_device(value) for key, value in batches.augmentation.items()}
        stretch = max(1, _STRETCH // (s.local.batch_size * s.examples.inputs[0].numel()))
        for begin in range(0, batches.steps, stretch):
            now = slice(begin, begin + stretch)
            xs = s.inputs(indices[now], client, {key: value[now] for key, value in augmentation.items()})
            for x, y, weights in zip(xs, s.examples.labels[indices[now]], real[now], strict=True):
                yield x.contiguous(memory_format=self.format) if x.ndim == 4 else x, y, weights

    def _step(self, optimizer: Stepper, x: Tensor, y: Tensor, real: Tensor, terms: Terms) -> Tensor:
        """Take one step; return (loss, nll)."""
        s = self.setting
        with s.autocast():
            logits = sampled_logits(self.model, x, s.samples)
        nll = cross_entropy(logits, y, real)
        loss = nll + penalty(self.parameters, terms)
        for p in self.parameters.values():
            p.grad = None
        loss.backward()
        for p in self.parameters.values():
            if p.grad is None:  # a parameter the forward pass did not use decays and is counted like the others
                p.grad = torch.zeros_like(p)
        if s.local.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), s.local.clip_norm)
        optimizer.step()
        return torch.stack([loss.detach(), nll.detach()])


def memory_format(setting: Setting) -> torch.memory_format:
    """Return how pictures and filters lie in memory: channels last for 2-D convolutions on a CPU, which are faster so.

    A rule and no measurement, so that simulation, processes and Flower's nodes compute the same bits. A network that cannot
    run so (``view`` on what a convolution returns) keeps torch's usual order.
    """
    usual, raw = torch.contiguous_format, setting.examples.inputs[:2]
    convolves = any(isinstance(m, nn.Conv2d) for m in setting.model.modules())
    if setting.device.type != "cpu" or not convolves or raw.ndim != 4 or not len(raw):
        return usual
    model = copy.deepcopy(setting.model).train()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = setting.transform(raw.expand(2, *raw.shape[1:])).contiguous(memory_format=torch.channels_last)
    with torch.random.fork_rng(devices=[]), setting.autocast():
        try:
            model(x).float().sum().backward()
        except RuntimeError:
            return usual
    return torch.channels_last


class _MomentMean:
    """Running mean of Adam's second raw moment (Reyes et al. 2021)."""

    def __init__(self, setting: Setting, parameters: dict[str, nn.Parameter]) -> None:
        self.setting, self.parameters, self.count = setting, parameters, 0
        self.total = {n: torch.zeros_like(p) for n, p in parameters.items()}

    def add(self, optimizer: Stepper) -> None:
        """Add the moment after one step."""
        self.count += 1
        for name, p in self.parameters.items():
            state = optimizer.state[p]
            second = state["exp_avg_sq"]
            if self.setting.capture.bias_correction:
                second = corrected_second_moment(second, state["step"].double(), self.setting.local)
            self.total[name] += second

    def mean(self) -> dict[str, Tensor]:
        """Return the mean so far."""
        return {n: t / self.count for n, t in self.total.items()}
