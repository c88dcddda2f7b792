"""Pre-training (Fischer, Table 4): runs of one launch that pre-train alike do it once."""

from fedbayes import config, runner

SMALL = {
    "rounds": 1, "data.limit": 300, "data.test_limit": 60, "data.mean": "global", "data.validation": 0.2,
    "partition.clients": 3, "model.name": "mlp", "model.width": 8, "pretrain.fraction": 0.2, "pretrain.epochs": 3,
    "evaluation.samples": 2, "engine.device": "cpu", "engine.lanes": 2,
}  # fmt: skip


def test_rules_that_are_compared_share_their_pretraining(monkeypatch, tmp_path):
    calls = []
    pretrain = runner.pretrain
    monkeypatch.setattr(runner, "pretrain", lambda *a, **k: calls.append(1) or pretrain(*a, **k))
    several = [
        config.override(config.Experiment(), {**SMALL, **change})
        for change in ({"fusion.rule": "ws"}, {"fusion.rule": "dwc", "objective.prior": "previous"}, {"seed": 1})
    ]
    launches = [runner.Launch(runner.prepare(e), tmp_path / str(i)) for i, e in enumerate(several)]
    runner.run_setups(launches, report=False)
    assert len(calls) == 2  # another seed is another network
    logs = [[e for e in runner.RunDirectory(p.path, p.setup.experiment, resume=True).events() if e["kind"] == "pretrain"]
            for p in launches]  # fmt: skip
    assert logs[0] == logs[1]
    assert 1 <= len(logs[0]) <= 3
    assert logs[0] != logs[2]
