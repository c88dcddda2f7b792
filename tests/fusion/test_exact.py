"""Order-independent sums, against rational arithmetic."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.errors import FedBayesError
from fedbayes.fusion import exact

values = st.one_of(
    st.floats(-1e18, 1e18),
    st.floats(-1e-3, 1e-3),
    st.sampled_from([0.0, 1.0, -1.0, 2.0**35, 2.0**34, -(2.0**35), 2.0**-1, 2.0**71, 1e200, -1e200, 5e-324, 1e-300]),
)


def total(terms):
    cells = exact.new_cells(1)
    for x in terms:
        exact.deposit(cells, torch.tensor([x], dtype=torch.float64))
    return cells


@settings(max_examples=200, deadline=None)
@given(data=st.data(), terms=st.lists(values, min_size=1, max_size=12))
def test_every_order_and_every_tree_gives_the_same_cells(data, terms):
    first = total(terms)
    assert torch.equal(total(data.draw(st.permutations(terms))), first)
    cut = data.draw(st.integers(0, len(terms)))
    left, right = total(terms[:cut]), total(terms[cut:])
    exact.merge(left, right)
    assert torch.equal(left, first)


@settings(max_examples=150, deadline=None)
@given(terms=st.lists(values, min_size=1, max_size=12))
def test_error_is_below_two_to_the_minus_70_of_the_largest_term(terms):
    high, low = exact.value(total(terms))
    got, want = Fraction(high.item()) + Fraction(low.item()), sum(map(Fraction, terms))
    assert abs(got - want) <= len(terms) * (
        max(abs(Fraction(x)) for x in terms) * Fraction(1, 2**70) + Fraction(2) ** -1000
    )


def test_many_terms_stay_exact():
    cells, x = exact.new_cells(3), torch.tensor([0.1, 1e10 / 3, -7e-9], dtype=torch.float64)
    for _ in range(5000):
        exact.deposit(cells, x)
    high, _ = exact.value(cells)
    assert high.tolist() == [float(5000 * Fraction(v)) for v in x.tolist()]


def test_too_large_a_term_is_refused_in_words():
    with pytest.raises(FedBayesError, match="largest that can be summed"):
        exact.deposit(exact.new_cells(1), torch.tensor([1e300], dtype=torch.float64))


@settings(max_examples=100, deadline=None)
@given(terms=st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=12))
def test_plain_pairs_agree_to_rounding(terms):
    pairs = exact.new_pairs(1)
    for x in terms:
        exact.deposit_pairs(pairs, torch.tensor([x], dtype=torch.float64))
    want = sum(map(Fraction, terms))
    assert abs(Fraction(pairs[0].item()) + Fraction(pairs[1].item()) - want) <= Fraction(1, 2**80) * sum(
        abs(Fraction(x)) for x in terms
    )
