"""Work shared out among threads: the same sums and counts with any number of them."""

import numpy as np
import pytest

from privagrad._internal.threads import add_parts, pool_of


@pytest.mark.parametrize("threads", [None, 1, 2, 5])
def test_all_parts_are_added_and_counted_once(threads):
    def add(partial, part):
        partial += part
        return len(part), 1

    total = np.array([10.0, 20.0, 30.0])
    parts = [np.arange(3.0) + k for k in range(7)]
    with pool_of(threads) as pool:
        assert (pool is None) == (threads == 1) or threads is None
        assert add_parts(total, add, parts, pool) == (21, 7)
    assert total.tolist() == [31.0, 48.0, 65.0]


def test_an_error_in_a_thread_is_raised():
    def fail(partial, part):
        raise ValueError("Expected another part.")

    with pool_of(2) as pool, pytest.raises(ValueError, match="another part"):
        add_parts(np.zeros(1), fail, [1, 2], pool)


def test_a_number_of_threads_is_at_least_one():
    with pytest.raises(ValueError, match="threads"), pool_of(0):
        pass
