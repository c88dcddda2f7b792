"""Lanes that do not fit: fewer of them, with a warning, and the same numbers. The errors are staged, no GPU is needed."""

from __future__ import annotations

import weakref

import pytest
import torch

from fedbayes.engine.graph import GraphLoop, Program
from fedbayes.engine.memory import fewer_lanes, out_of_memory
from fedbayes.engine.stacked import StackedModel
from fedbayes.errors import RunError
from fedbayes.experiment import Local

from .conftest import MakeCohort, assign, distance, norm_net, split, start_of, train

SIZES = [40, 1, 33, 5, 16, 64, 90]
LOCAL = Local(batch_size=16)


def with_graph(make: MakeCohort, lanes: int, model: torch.nn.Module):
    cohort = make(model, split(SIZES), lanes, LOCAL)
    cohort._loops[lanes] = GraphLoop(cohort.setting, lanes, compiled=False)
    return cohort


def same_as_plain(make: MakeCohort, model: torch.nn.Module, found: dict) -> None:
    plain = train(make(model, split(SIZES), 1, LOCAL), assign(start_of(model), len(SIZES)))
    assert found.keys() == plain.keys()
    for key, update in plain.items():
        assert distance(update.posterior, found[key].posterior) < 1e-4


def test_what_counts_as_lack_of_memory():
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    came_of_it = RuntimeError("the capture was given up")
    came_of_it.__context__ = torch.OutOfMemoryError("full")
    assert out_of_memory(came_of_it)
    assert not out_of_memory(RuntimeError("shapes do not match"))
    assert not out_of_memory(None)


def test_half_as_many_each_time_down_to_one():
    with pytest.warns(RuntimeWarning, match="25 lanes do not fit the GPU's memory; going on with 12"):
        assert fewer_lanes(25) == 12
    with pytest.raises(RunError, match="not hold a single lane"):
        fewer_lanes(1)


@pytest.mark.parametrize("inside_a_capture", [False, True])
def test_a_compiled_step_is_narrowed(make: MakeCohort, monkeypatch, inside_a_capture: bool):
    real, attempts, alive = Program.__init__, [], []

    def init(self, model, jobs, width, block, capacity):
        attempts.append((width, sum(ref() is not None for ref in alive)))
        alive.append(weakref.ref(self))
        real(self, model, jobs, width, block, capacity)
        if width > 1 and inside_a_capture:
            raise RuntimeError("capture ended") from torch.OutOfMemoryError("full")
        if width > 1:
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Program, "__init__", init)
    model = norm_net()
    cohort = with_graph(make, 7, model)
    cohort._loops[7].shape = (5, 2, 64)
    with pytest.warns(RuntimeWarning, match="going on with") as said:
        found = train(cohort, assign(start_of(model), len(SIZES)))
    assert [str(w.message).split(" do ")[0] for w in said] == ["5 lanes", "2 lanes"]
    assert attempts == [(5, 0), (2, 0), (1, 0)]  # nothing of an attempt is left when the next begins
    assert cohort.statistics()["lanes"] == 1
    assert cohort.state()["shape"] == [1, 2, 64]
    same_as_plain(make, model, found)


def test_other_errors_are_not_taken_for_it(make: MakeCohort, monkeypatch):
    def init(self, *_):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(Program, "__init__", init)
    model = norm_net()
    with pytest.raises(RuntimeError, match="no kernel image"):
        train(with_graph(make, 7, model), assign(start_of(model), len(SIZES)))


def test_eager_lanes_go_on_where_they_were(make: MakeCohort, monkeypatch):
    """The error comes when some clients are done already; the others begin anew, none is trained or told twice."""
    real, steps = StackedModel.gradients, []

    def gradients(self, rows, width, *rest):
        steps.append(width)
        if width == 3 and len(steps) > 6:
            raise torch.OutOfMemoryError("full")
        return real(self, rows, width, *rest)

    monkeypatch.setattr(StackedModel, "gradients", gradients)
    model = norm_net()
    cohort = make(model, split(SIZES), 3, LOCAL)
    with pytest.warns(RuntimeWarning, match="3 lanes do not fit the GPU's memory; going on with 1"):
        updates = list(cohort.train(assign(start_of(model), len(SIZES))))
    assert 3 in steps
    assert 1 in steps
    assert sorted(u.client for u in updates) == list(range(len(SIZES)))
    assert cohort.statistics()["lanes"] == 1
    monkeypatch.undo()
    same_as_plain(make, model, {(u.run, u.client): u for u in updates})


def test_a_shape_is_kept_over_a_resume(make: MakeCohort):
    model = norm_net()
    cohort = make(model, split(SIZES), 7, LOCAL)
    cohort.restore({"lanes": 7, "workers": 1, "shape": [3, 2, 300], "optimizers": {}})
    assert cohort.state()["shape"] == [3, 2, 300]
    assert make(model, split(SIZES), 7, LOCAL).state()["shape"] == []
