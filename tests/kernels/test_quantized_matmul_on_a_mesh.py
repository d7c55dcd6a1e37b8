"""Quantised matrices that devices divide: each multiplies its part, and sums are added once."""

import pytest

from tests import eight_devices


@pytest.fixture(scope="module")
def printed():
    return eight_devices.printed("tests.kernels.quantised_parts_on_a_mesh")


def test_parts_of_a_matrix_give_the_product_of_the_whole_with_one_all_reduce_at_most(printed):
    lines = [line for line in printed if "divided" in line]
    assert len(lines) == 27
    for line in lines:
        assert line["error"] < 1e-5, line
        assert line["collectives"] == ({"all-reduce": 1} if line["divided"] == "inputs" else {})


def test_matrices_are_read_for_the_kernel_in_parts_and_others_as_xla_divides_them(printed):
    (stored,) = [line["stored"] for line in printed if "stored" in line]
    kernels, others = stored
    assert kernels == ["Transposed", [None, "tensor"], True]
    assert others == ["Quantized", ["tensor"], True]


def test_two_devices_give_the_texts_of_one_with_the_collectives_of_plain_weights(printed):
    (texts,) = [line["texts"] for line in printed if "texts" in line]
    assert texts[0] == texts[1] and all(len(set(text)) > 3 for text in texts[0])
    (counted,) = [
        line["collectives"] for line in printed if "collectives" in line and len(line) == 1
    ]
    plain, quantised = counted
    assert plain == quantised and set(plain) == {"all-reduce"}
