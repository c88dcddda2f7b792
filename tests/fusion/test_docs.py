"""The documentation's table is the code's, and the rule of ``docs/adding-a-rule.md`` works as written."""

import re
import sys
from pathlib import Path

import pytest
import torch

from fedbayes.errors import ConfigError
from fedbayes.fusion import client_weights, fuse, get_rule, get_weighting, listing, markdown_table, rules, weightings

DOCS = Path(__file__).parents[2] / "docs"


def test_table_of_rules_is_current():
    page = (DOCS / "fusion.md").read_text(encoding="utf-8")
    own = [row for row in markdown_table().splitlines() if "test-" not in row and "power-mean" not in row]
    assert all(row in page for row in own)
    own = [w.name for w in weightings() if w.name != "by-trust" and not w.name.startswith("test-")]
    assert all(f"| `{name}` |" in page for name in own)


def test_listing_names_everything_a_configuration_may_say():
    page = listing()
    for one in (*rules(), *weightings()):
        assert re.search(rf"^{re.escape(one.name)}\b", page, re.M), one.name
        assert all(alias in page for alias in one.aliases), one.name
    assert max(map(len, listing(60).splitlines())) <= 110  # heads with aliases are not cut


def test_the_example_rule_works_by_name(tmp_path, monkeypatch, clients):
    page = (DOCS / "adding-a-rule.md").read_text(encoding="utf-8")
    (tmp_path / "my_rules.py").write_text(re.findall(r"```python\n(.*?)```", page, re.S)[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    rule = get_rule("my_rules:power-mean", power="3")
    assert rule.options() == {"power": 3.0}
    got = fuse(clients, rule="pm", power=3, weights=[2] * 7).gaussians["fc.weight"].variance
    stacked = torch.stack([q.gaussians["fc.weight"].variance for q in clients]).double()
    torch.testing.assert_close(got.double(), stacked.pow(3).mean(0).pow(1 / 3), rtol=1e-6, atol=0)
    sys.modules.pop("my_rules")
    with pytest.raises(ConfigError, match="cannot be imported"):
        get_rule("no_such_module:rule")


def test_the_example_weighting_works_by_name(tmp_path, monkeypatch):
    page = (DOCS / "adding-a-rule.md").read_text(encoding="utf-8")
    (tmp_path / "my_weights.py").write_text(
        re.findall(r"```python\n(# my_weights.*?)```", page, re.S)[0], encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert client_weights(get_weighting("my_weights:by-trust"), {0: 5, 2: 5}) == pytest.approx(
        {0: 1 / 1.1, 2: 0.1 / 1.1}
    )
    sys.modules.pop("my_weights")
