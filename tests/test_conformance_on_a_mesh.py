"""Every drafting method with every tree and rule on several devices: the texts of one device.

``make test-more`` runs a few cases, ``make conformance`` all of the cover of test_conformance.py,
with 2, 4 and 8 devices.
"""

import pytest

from tests import eight_devices
from tests.test_conformance import DRAFTERS


def check(*methods):
    cases = eight_devices.printed("tests.conformance_on_a_mesh", *methods)
    # None: the caches of a method of users have no pages.
    assert {case["preempted"] for case in cases} & {True, None}
    for case in cases:
        assert case["several"] == case["one"], case["case"]


def test_a_few_methods_conform_on_several_devices():
    check("few")


@pytest.mark.slow
@pytest.mark.parametrize("method", DRAFTERS)
def test_a_method_conforms_on_several_devices(method):
    check(method)
