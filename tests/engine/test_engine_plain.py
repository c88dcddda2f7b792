"""How the plain loop lays pictures out in memory changes nothing but speed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedbayes.engine import plain
from fedbayes.experiment import Local

from .conftest import MakeCohort, assign, distance, norm_net, split, start_of, train


class Viewing(nn.Module):
    """A network that insists on the usual memory order, as many tutorials' networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 36, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).view(x.shape[0], -1))


def test_convolutions_have_channels_last_unless_the_network_cannot(make: MakeCohort) -> None:
    torch.manual_seed(0)
    shards = split([20, 7])
    for model, expected in ((norm_net(), torch.channels_last), (Viewing(), torch.contiguous_format)):
        before = torch.random.get_rng_state()
        cohort = make(model, shards, 1)
        assert plain.memory_format(cohort.setting) == expected
        assert torch.equal(before, torch.random.get_rng_state())
        updates = train(cohort, assign(start_of(model), 2))
        for update in updates.values():
            assert all(t.is_contiguous() for t in update.posterior.points.values())
    untouched = norm_net()
    assert int(untouched.norm.num_batches_tracked) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("local", [Local(batch_size=16, keep_state=True), Local(batch_size=16, weight_decay=1e-2)])
def test_the_order_in_memory_changes_rounding_alone(make: MakeCohort, monkeypatch, local: Local) -> None:
    model, found = norm_net(), {}
    for order in (torch.channels_last, torch.contiguous_format):
        monkeypatch.setattr(plain, "memory_format", lambda setting, order=order: order)
        cohort = make(model, split([40, 1, 33]), 1, local)
        for round in (1, 2):
            found[order] = train(cohort, assign(start_of(model), 3, round=round))
        state = cohort.state()["optimizers"]
        found[order] = (found[order], state)
    (last, kept), (usual, kept_usual) = found[torch.channels_last], found[torch.contiguous_format]
    for key, update in last.items():
        assert distance(update.posterior, usual[key].posterior) < 1e-4
    for client, memory in kept.items():
        for name, row in memory["rows"].items():
            torch.testing.assert_close(row, kept_usual[client]["rows"][name], rtol=1e-2, atol=1e-4)
