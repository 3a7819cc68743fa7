import pytest

from fedel.core.bias import o1


def test_everyone_training_everything_has_no_bias():
    assert 0.0 == o1([{"a", "b", "c"}] * 4, ["a", "b", "c"])


def test_the_vector_of_two_clients():
    assert 1.0 == o1([{"a", "b"}, {"a"}], ["a", "b"])


def test_tensors_that_nobody_trained_count_in_k_alone():
    # c = (1/2, 1/2) on tensor a; K = 4: two times (4 * 1/2 - 1/2).
    assert 3.0 == pytest.approx(o1([{"a"}, {"a"}], ["a", "b", "c", "d"]))
