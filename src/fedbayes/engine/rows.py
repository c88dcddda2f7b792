"""The state of all lanes: matrices with one row a lane, so that a client moves between lanes as a row copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import PosteriorError
from ..nn.state import to_posterior
from ..objective import Terms
from ..posterior import Gaussian, Posterior
from .divergence import add_kl_gradient, divergence
from .optimizers import Memory, Rates, moments_of
from .setting import Job, Setting, starting_state

_SCALARS = ("kl", "l2", "proximal", "prior variance", "divisor")


class Rows:
    """Everything that belongs to the client on a lane, row by row.

    Optional parts exist only where a job of the launch needs them: ``anchor`` (proximal term), ``prior`` (a posterior as
    prior), ``captured`` (Adam's second moment). What exists is decided once per launch, so shapes never change in it.
    """

    def __init__(self, setting: Setting, jobs: Sequence[Job], lanes: int) -> None:
        self.setting, self.lanes = setting, lanes
        trained = setting.layout.trained
        self.parameters = self._zeros(trained.size)
        self.others = {
            dtype: torch.zeros(lanes, layout.size, dtype=dtype, device=setting.device)
            for dtype, layout in setting.layout.others.items()
        }
        self.moments = {name: self._zeros(trained.size) for name in moments_of(setting.local)}
        self.steps = self._zeros(1, torch.float64)
        self.rates = self._zeros(2, torch.float64)
        self.client = torch.zeros(lanes, dtype=torch.int64, device=setting.device)
        self.scalars = self._zeros(len(_SCALARS)) + 1  # idle lanes need a positive prior variance and divisor
        assignments = [job.assignment for job in jobs]
        self.gaussians = trained.gaussians
        self.full_prior = any(a.prior is not None for a in assignments) and bool(self.gaussians.names)
        self.prior_mean = self._zeros(self.gaussians.size) if self.full_prior else None
        self.prior_variance = self._zeros(self.gaussians.size) + 1 if self.full_prior else None
        self.anchor = self._zeros(trained.size) if any(a.proximal != 0 for a in assignments) else None
        self.decayed = any(a.l2 != 0 for a in assignments)
        self.captured = self._zeros(trained.size) if setting.capture.enabled else None
        self._starts: dict[int, tuple[Tensor, dict[torch.dtype, Tensor]]] = {}
        self._priors: dict[int, tuple[Tensor, Tensor]] = {}

    def _zeros(self, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(self.lanes, size, dtype=dtype, device=self.setting.device)

    def forget(self) -> None:
        """Drop what was kept about the last launch's starts and priors; to be called before a new launch."""
        self._starts.clear()
        self._priors.clear()

    def tensors(self) -> list[Tensor]:
        """Return every matrix that has one row a lane."""
        optional = (self.prior_mean, self.prior_variance, self.anchor, self.captured)
        return [
            self.parameters, *self.others.values(), *self.moments.values(), self.steps, self.rates, self.client,
            self.scalars, *(t for t in optional if t is not None),
        ]  # fmt: skip

    def move(self, moves: Mapping[int, int]) -> None:
        """Copy rows: ``moves`` maps a new lane to the lane its client was on."""
        if moves:
            to = torch.tensor(list(moves), device=self.setting.device)
            source = torch.tensor(list(moves.values()), device=self.setting.device)
            for matrix in self.tensors():
                matrix[to] = matrix[source]

    def load(self, seats: Mapping[int, Job]) -> None:
        """Put clients on lanes: their starts, fresh or remembered optimisers, their coefficients."""
        if not seats:
            return
        device, index = self.setting.device, torch.tensor(list(seats), device=self.setting.device)
        assignments = [job.assignment for job in seats.values()]
        self._load_starts(seats)
        self.client[index] = torch.tensor([self.setting.site(a) for a in assignments], device=device)
        self.scalars[index] = torch.tensor(
            [[a.kl_weight / a.divisor, a.l2, a.proximal, a.prior_std**2, a.divisor] for a in assignments], device=device
        )
        rates = [Rates.of(self.setting.local, a.learning_rate) for a in assignments]
        self.rates[index] = torch.tensor([[r.mean, r.sigma] for r in rates], dtype=torch.float64, device=device)
        for matrix in (self.steps, *self.moments.values(), *((self.captured,) if self.captured is not None else ())):
            matrix[index] = 0
        for lane, job in seats.items():
            if job.memory is not None:
                self.steps[lane] = job.memory.steps
                for name, matrix in self.moments.items():
                    matrix[lane] = job.memory.rows[name].to(device)
            if self.prior_mean is not None and self.prior_variance is not None:
                self.prior_mean[lane], self.prior_variance[lane] = self._prior(job)

    def _load_starts(self, seats: Mapping[int, Job]) -> None:
        by_start: dict[int, list[int]] = {}
        for lane, job in seats.items():
            by_start.setdefault(id(job.assignment.start), []).append(lane)
        for lanes in by_start.values():
            row, others = self._start(seats[lanes[0]])
            index = torch.tensor(lanes, device=self.setting.device)
            self.parameters[index] = row
            if self.anchor is not None:
                self.anchor[index] = row
            for dtype, other in others.items():
                self.others[dtype][index] = other

    def _start(self, job: Job) -> tuple[Tensor, dict[torch.dtype, Tensor]]:
        """Return the start's rows, converted once for all clients of a launch that share it."""
        posterior, layout = job.assignment.start, self.setting.layout
        if id(posterior) not in self._starts:
            device = self.setting.device
            state = starting_state(posterior, layout, device)
            layout.check(state, job.assignment.client)
            row = layout.trained.row(state, torch.float32, device)
            self._starts[id(posterior)] = row, {d: l.row(state, d, device) for d, l in layout.others.items()}
        return self._starts[id(posterior)]

    def _prior(self, job: Job) -> tuple[Tensor, Tensor]:
        prior, device = job.assignment.prior, self.setting.device
        if prior is None:
            size = self.gaussians.size
            return torch.zeros(size, device=device), torch.full((size,), job.assignment.prior_std**2, device=device)
        if id(prior) not in self._priors:
            self._check_prior(prior)
            means = {n: prior.gaussians[n].mean for n in self.gaussians.names}
            variances = {n: prior.gaussians[n].variance for n in self.gaussians.names}
            mean, variance = (self.gaussians.row(t, torch.float32, device) for t in (means, variances))
            self._priors[id(prior)] = mean, variance
        return self._priors[id(prior)]

    def _check_prior(self, prior: Posterior) -> None:
        for name, shape in zip(self.gaussians.names, self.gaussians.shapes, strict=True):
            if name not in prior.gaussians or prior.gaussians[name].mean.shape != shape:
                raise PosteriorError(f"the prior has no Gaussian '{name}' of shape {tuple(shape)}.")

    # -- the loss --------------------------------------------------------------------------------------------

    def prior(self, width: int) -> tuple[Tensor | float, Tensor]:
        """Return the priors' mean and variance, to broadcast against rows of Gaussian means."""
        if self.prior_mean is None or self.prior_variance is None:
            return 0.0, self.scalars[:width, 3:4]
        return self.prior_mean[:width], self.prior_variance[:width]

    def divergence(self, width: int) -> Tensor:
        """Return each lane's KL(q‖prior)."""
        trained, rows = self.setting.layout.trained, self.parameters[:width]
        return divergence(rows[:, trained.mean_slice], rows[:, trained.rho_slice], *self.prior(width))

    def add_kl_gradient(self, gradients: Tensor, width: int) -> Tensor:
        """Add the gradient of each lane's KL term to rows of gradients, in place; return each lane's KL."""
        trained, rows = self.setting.layout.trained, self.parameters[:width]
        return add_kl_gradient(
            gradients[:, trained.mean_slice.start :], rows[:, trained.mean_slice], rows[:, trained.rho_slice],
            *self.prior(width), self.scalars[:width, 0:1],
        )  # fmt: skip

    def terms(self, width: int) -> Terms | None:
        """Return the coefficients of the penalties beside the KL, stacked (None where no client has any)."""
        if self.anchor is None and not self.decayed:
            return None
        kl, l2, proximal, _, divisor = self.scalars[:width].unbind(1)
        if not self.decayed:
            l2 = self.scalars[:width, :0]  # no elements: the term is left out
        anchor = {} if self.anchor is None else self.setting.layout.trained.views(self.anchor[:width])
        return Terms(
            kl=kl, prior_mean={}, prior_variance={}, l2=l2, proximal=proximal, anchor=anchor, divisor=divisor
        )  # fmt: skip

    # -- reading ---------------------------------------------------------------------------------------------

    def buffers(self, width: int) -> dict[str, Tensor]:
        """Return buffers and untrained parameters of the first ``width`` lanes as contiguous copies."""
        found: dict[str, Tensor] = {}
        for dtype, layout in self.setting.layout.others.items():
            views = layout.views(self.others[dtype][:width])
            found |= {n: t.clone(memory_format=torch.contiguous_format) for n, t in views.items()}
        return found

    def store_buffers(self, buffers: Mapping[str, Tensor], width: int, active: Tensor | None = None) -> None:
        """Write buffers back; lanes that are not ``active`` keep theirs."""
        for dtype, layout in self.setting.layout.others.items():
            new, old = layout.stack([buffers[n] for n in layout.names]), self.others[dtype][:width]
            old.copy_(new if active is None else torch.where(active, new, old))

    def posteriors(self, lanes: Sequence[int]) -> list[Posterior]:
        """Return the posteriors on some lanes, converted together; they share no memory with the rows."""
        trained = self.setting.layout.trained
        index = torch.tensor(list(lanes), device=self.setting.device)
        rows = self.parameters[index]
        flat = to_posterior({"w": rows[:, trained.mean_slice], "w_rho": rows[:, trained.rho_slice]}).gaussians["w"]
        others = {dtype: (layout, self.others[dtype][index]) for dtype, layout in self.setting.layout.others.items()}
        count = trained.mean_slice.start
        found = []
        for i in range(len(rows)):
            means, variances = trained.gaussians.views(flat.mean[i]), trained.gaussians.views(flat.variance[i])
            points = trained.points.views(rows[i, :count])
            for layout, matrix in others.values():
                points |= layout.views(matrix[i])
            found.append(Posterior({n: Gaussian(means[n], variances[n]) for n in means}, points))
        return found

    def memory(self, lane: int) -> Memory:
        """Return a copy of the optimiser's state on a lane."""
        return Memory(int(self.steps[lane]), {n: m[lane].clone() for n, m in self.moments.items()})

    def moment(self, lane: int, count: int) -> dict[str, Tensor]:
        """Return the captured second moment's mean over ``count`` steps."""
        assert self.captured is not None
        return self.setting.layout.trained.views(self.captured[lane] / count)
