import math

import pytest

from fedel.experiments.stats import estimate, paired, t_cdf, t_quantile, wilcoxon


def test_the_interval_of_three_values():
    """Mean 5, standard deviation 1, so 4.303 / sqrt(3) to each side."""
    found = estimate([4.0, 5.0, 6.0])
    assert pytest.approx(5.0) == found.mean
    assert pytest.approx(4.302653 / math.sqrt(3), rel=1e-6) == found.half
    assert (found.low, found.high) == (found.mean - found.half, found.mean + found.half)


def test_one_value_has_no_interval():
    assert estimate([4.0]).half is None


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (9, 2.26216), (30, 2.04227)]
)
def test_quantiles_are_those_of_the_tables(freedom, quantile):
    assert pytest.approx(quantile, rel=1e-5) == t_quantile(0.975, freedom)
    assert pytest.approx(0.025, rel=1e-4) == t_cdf(-quantile, freedom)


def test_a_paired_t_test():
    """Differences 1, 2, 3: t = 2 / (1 / sqrt(3)) = 3.4641 with two degrees of freedom, p = 0.0742."""
    found = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert ("paired t", 2.0) == (found.test, found.difference.mean)
    assert pytest.approx(0.07418, abs=1e-5) == found.p_value


def test_methods_that_are_equal_do_not_differ():
    assert 1.0 == paired([2.0, 3.0], [2.0, 3.0]).p_value
    assert paired([2.0], [1.0]).p_value is None


def test_six_pairs_are_compared_by_their_ranks():
    """All positive: two of the 64 signs are as extreme."""
    found = paired([1.0, 2, 3, 4, 5, 6], [0.0] * 6)
    assert ("Wilcoxon", 2 / 64) == (found.test, found.p_value)
    assert 1.0 == wilcoxon([1, -1, 2, -2, 3, -3])
