"""From events to printed numbers, on runs written by hand."""

import json
import math

import pytest

from fedbayes.recipes import measures
from fedbayes.recipes.measures import Outcome, judge
from fedbayes.recipes.published import place


def write(path, accuracies, nlls=None, validation=None):
    path.mkdir()
    lines = []
    for i, a in enumerate(accuracies):
        metrics = {"accuracy": a, "nll": (nlls or [1.0] * len(accuracies))[i]}
        lines.append({"kind": "evaluation", "round": i + 1, "split": "test", "model": "global", "metrics": metrics})
        if validation:
            lines.append({"kind": "evaluation", "round": i + 1, "split": "validation", "model": "global",
                          "metrics": {"nll": validation[i], "accuracy": 0}})  # fmt: skip
    lines.append({"kind": "end", "rounds": len(accuracies), "best_round": 1, "seconds": 1})
    (path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    return path


@pytest.fixture
def runs(tmp_path):
    a = write(tmp_path / "a", [0.5, 0.7, 0.6], [0.9, 0.4, 0.5], [0.3, 0.5, 0.6])
    b = write(tmp_path / "b", [0.4, 0.8, 0.7], [0.9, 0.3, 0.6], [0.5, 0.2, 0.6])
    return [a, b]


def test_last_and_its_spread_over_seeds(runs):
    o = measures.read(runs, "accuracy", "last")
    assert (o.value, o.seeds) == (pytest.approx(0.65), 2)
    assert o.spread == pytest.approx(math.sqrt(2 * 0.05**2))


def test_best_by_test_and_by_validation(runs):
    assert measures.read(runs, "accuracy", "best-test-nll").value == pytest.approx(0.75)
    assert measures.read(runs, "accuracy", "best-validation-nll").value == pytest.approx((0.5 + 0.8) / 2)


def test_over_rounds(runs):
    o = measures.read(runs[:1], "accuracy", "rounds")
    assert o.value == pytest.approx(0.6)
    assert o.spread == pytest.approx(0.1)


def test_rounds_to_a_target(runs):
    assert measures.rounds_to(runs, 0.65).value == 2
    assert measures.rounds_to(runs[1:], 0.75).value == 2
    assert measures.rounds_to(runs, 0.75).value == math.inf  # one of the two ended without it
    assert measures.rounds_to([], 0.75) is None


def test_one_run_answers_several_targets(runs):
    at = {"rule": "fedavg", "fraction": 0.1}
    done = {place(at): (runs[:1], "global")}
    assert measures.outcome(place({**at, "target": 60}), "rounds", "last", done).value == 2
    never = measures.outcome(place({**at, "target": 75}), "rounds", "last", done)
    assert judge(place(at), "rounds", 65.0, None, never).word == "differs"
    assert measures.outcome(place({**at, "target": 75}), "rounds", "last", {place(at): ([], "global")}) is None


def test_a_run_that_ended_in_no_number_differs(tmp_path):
    o = measures.read([write(tmp_path / "nan", [0.5, None])], "accuracy", "last")
    assert math.isnan(o.value)
    assert judge(place({}), "accuracy", 0.5, 0.1, o).word == "differs"
    assert measures.read([tmp_path / "nan"], "ece", "last") is None  # was never measured
    partly = write(tmp_path / "partly", [0.5, 0.6, 0.1], [0.9, 0.5, None], [0.4, 0.3, None])
    found = measures.read([partly], "accuracy", "best-validation-nll")
    assert found is not None
    assert found.value == 0.6  # rounds without a number are never the best


def test_reliability_and_its_mean_over_batches(runs):
    done = {place({"batch": b, "rule": "fedavg"}): ([r], "global") for b, r in zip((10, 25), runs, strict=True)}
    one = measures.outcome(place({"batch": 10, "rule": "fedavg"}), "reliability", "rounds", done)
    sd = math.sqrt(((0.5 - 0.6) ** 2 + (0.7 - 0.6) ** 2) / 3)
    assert one.value == pytest.approx(1 - sd / 0.6)
    mean = measures.outcome(place({"batch": "mean", "rule": "fedavg"}), "reliability", "rounds", done)
    two = measures.outcome(place({"batch": 25, "rule": "fedavg"}), "reliability", "rounds", done)
    assert mean.value == pytest.approx((one.value + two.value) / 2)
    unfinished = {**done, place({"batch": 50, "rule": "fedavg"}): ([], "global")}
    unfinished[place({"batch": 50, "rule": "fedavg"})] = ([write(runs[0].parent / "c", [0.5])], "global")
    assert measures.outcome(place({"batch": "mean", "rule": "fedavg"}), "reliability", "rounds", unfinished) is None
    hopeless = write(runs[0].parent / "d", [0.0, 0.0])
    for path in (hopeless, write(runs[0].parent / "e", [0.5, None])):
        assert math.isnan(measures.reliability([path]).value)
    done[place({"batch": 50, "rule": "fedavg"})] = ([hopeless], "global")
    mean = measures.outcome(place({"batch": "mean", "rule": "fedavg"}), "reliability", "rounds", done)
    assert judge(place({}), "reliability", 0.9, None, mean).word == "differs"


def test_a_predictive_variance_is_judged_at_its_own_size():
    def word(paper: float, ours: float) -> str:
        return judge(place({}), "predictive_variance", paper, None, Outcome(ours, math.nan, 1)).word

    assert word(0.0406, 0.045) == "agrees"
    assert word(0.0406, 0.03) == "differs"
    assert word(6.6e-11, 3e-9) == "agrees"  # no uncertainty to speak of, either way
    assert word(6.6e-11, 1e-3) == "differs"  # an absolute half point would have called it the same


def test_verdicts():
    at = place({"rule": "nwa"})
    v = judge(at, "accuracy", 0.80, 0.03, Outcome(0.90, 0.04, 3))
    assert (v.difference, v.word) == (pytest.approx(2.0), "agrees")
    assert judge(at, "accuracy", 0.80, 0.03, Outcome(0.91, 0.04, 3)).word == "differs"
    assert judge(at, "accuracy", 0.80, 0.03, None).word == "not run"
    # no spread known anywhere: the noise floor of half a point
    assert judge(at, "accuracy", 0.80, None, Outcome(0.809, math.nan, 1)).word == "agrees"
    assert judge(at, "accuracy", 0.80, None, Outcome(0.815, math.nan, 1)).word == "differs"
    assert judge(at, "accuracy", 0.80, None, Outcome(0.815, math.nan, 1), {"accuracy": 0.01}).word == "agrees"


def test_an_unknown_report_is_refused(runs):
    with pytest.raises(Exception, match="report 'lats'"):
        measures.read(runs, "accuracy", "lats")
