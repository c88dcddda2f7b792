"""The server's inputs: another data set, of another size and domain, with or without labels."""

import numpy as np
import pytest

from fedbayes import config, runner
from fedbayes.errors import DataError

FORMS = {
    "colour, twice the size": {
        "x_train": (40, 3, 16, 16),
        "y_train": (40,),
        "x_test": (10, 3, 16, 16),
        "y_test": (10,),
    },
    "inputs alone": {"x_test": (40, 1, 8, 8)},
}


def experiment(path):
    return config.override(
        config.Experiment(),
        {
            "rounds": 1, "data.limit": 200, "data.test_limit": 60, "partition.clients": 3, "model.name": "mlp",
            "model.kind": "deterministic", "fusion.rule": "fedavg", "distill.enabled": True, "distill.data": str(path),
            "distill.epochs": 3, "distill.swa": "none", "engine.device": "cpu", "engine.lanes": 1,
        },
    )  # fmt: skip


def write(path, forms):
    rng = np.random.default_rng(0)
    np.savez(
        path,
        **{
            n: np.arange(s[0]) % 10 if len(s) == 1 else rng.integers(0, 256, s, dtype=np.uint8)
            for n, s in forms.items()
        },
    )
    return path


@pytest.mark.parametrize("form", FORMS)
def test_another_data_set_teaches(tmp_path, form):
    """The server's images are noise; the clients' are grey digits, 8 x 8. No client image is held back for the server."""
    e = experiment(write(tmp_path / "noise.npz", FORMS[form]))
    setup = runner.prepare(e)
    assert setup.unlabelled is not None
    assert setup.unlabelled.inputs.shape == (40, 1, 8, 8)
    assert sum(len(s) for s in setup.shards) + len(setup.validation) == 200
    events = runner.run(e, write=False).events
    (event,) = [x for x in events if x["kind"] == "distill"]
    assert event["examples"] == 40


def test_a_limit_of_the_training_set_limits_the_server_too(tmp_path):
    """A shrunken run (the scales of a recipe) must not distil on the whole of another data set."""
    path = write(tmp_path / "noise.npz", {"x_train": (500, 1, 8, 8), "y_train": (500,)})
    unlabelled = runner.prepare(experiment(path)).unlabelled
    assert unlabelled is not None
    assert len(unlabelled) == 200
    whole = runner.prepare(config.override(experiment(path), {"data.limit": 0})).unlabelled
    assert whole is not None
    assert len(whole) == 500


def test_inputs_that_cannot_be_made_to_fit_are_refused(tmp_path):
    np.savez(tmp_path / "table.npz", x_test=np.zeros((40, 13), dtype=np.float32))
    with pytest.raises(DataError, match=r"\(13,\).*\(1, 8, 8\)"):
        runner.prepare(experiment(tmp_path / "table.npz"))
