"""What the report says of a run over Flower: bytes of each client, epsilon after each round, who did not answer."""

import re

import pytest
from flower_cases import Clock, grid_of, small

from fedbayes import runner
from fedbayes.flower import section as transport
from fedbayes.flower.server import Settings, cohort_of, serve
from fedbayes.report.runs import Run


def cells(html):
    return [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html) if "<td>" in row]


def test_bytes_of_every_client_each_way_and_failures_with_their_reason(tmp_path):
    grid, clock = grid_of(3), Clock()
    grid.before = lambda node, message: setattr(
        node, "silent", node.node == 1001 and message.metadata.message_type == "train"
    )
    experiment = small(rounds=2, participation__quorum=0.5, participation__deadline=5.0)
    setup = runner.prepare(experiment)
    cohort = cohort_of(grid, setup)
    cohort.clock, cohort.sleep = clock.now, clock.sleep
    result = runner.run_with(cohort, [runner.Launch(setup, tmp_path / "run")], report=False)[0]
    html = transport.section(Run(result.path))
    rounds = [e for e in result.events if e["kind"] == "round"]
    for client, row in zip(("0", "1", "2"), cells(html), strict=True):
        up, down = (sum(e["bytes"]["clients"][client][way] for e in rounds) for way in ("up", "down"))
        assert row == [client, "2", f"{up / 2:,.0f}", f"{down / 2:,.0f}", f"{up:,}", f"{down:,}"]
    assert cells(html)[1][2] == "0"  # it never answered
    assert "round 2, client 1: no answer within 5 s" in html


def test_the_page_tells_epsilon_of_every_round_beside_the_traffic(tmp_path):
    pytest.importorskip("dp_accounting", reason="needs the extra 'privacy'")
    experiment = small(
        rounds=3,
        fusion__private=True,
        fusion__weighting="equal",
        data__mean="none",
        privacy__clip=5.0,
        privacy__noise=2.0,
    )
    result = serve(grid_of(3), Settings(experiment, str(tmp_path / "run")))
    page = (tmp_path / "run" / "report.html").read_text()
    spent = [e["fusion"]["privacy"]["epsilon"] for e in result.events if e["kind"] == "round"]
    shown = cells(page[page.index("ε so far") :])[:3]
    assert [float(row[1]) for row in shown] == pytest.approx(spent, rel=5e-3)
    assert "bytes up a round" in page


def test_a_simulation_has_no_such_section(tmp_path):
    result = runner.run(small(rounds=1), tmp_path / "run", report=False)
    assert transport.section(Run(result.path)) is None
