"""Kernels of several devices, each on its own heads."""

import pytest

from tests import eight_devices
from tests.kernels import on_a_mesh


@pytest.fixture(scope="module")
def lines():
    return eight_devices.printed("tests.kernels.on_a_mesh")


def test_a_kernel_on_the_heads_of_each_device_is_the_attention_of_one_device(lines):
    cases = {tuple(line["case"]): line for line in lines if "case" in line}
    assert list(cases) == [(name, page) for name in on_a_mesh.CASES for page in (None, 8)]
    for (name, _), line in cases.items():
        assert line["difference"] < 2e-5
        heads, _, _, is_split = on_a_mesh.CASES[name]
        assert line["heads"] == (heads // on_a_mesh.DEVICES if is_split else heads)


def test_texts_with_kernels_on_several_devices_are_those_of_xla_on_one(lines):
    (line,) = [line for line in lines if "one" in line]
    assert line["several"] == line["one"]
    assert all(len(text) == 20 for text in line["one"])


def test_a_mixture_on_the_columns_of_each_device_is_that_of_one_device(lines):
    (line,) = [line for line in lines if "experts" in line]
    assert line["experts"] < 1e-2
