"""Every family whose weights two devices share has the logits of transformers."""

import numpy as np
import pytest

from tests import eight_devices
from tests.families import models, table


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "families"
    directories = [models.saved(case, folder) for case in table.ENGINE]
    lines = eight_devices.printed("tests.families.on_two_devices", 2, *directories)
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", table.ENGINE)
def test_logits_of_two_devices_equal_those_of_transformers(case, printed):
    theirs, _ = models.states(case)[0]
    line = printed[case]
    for name in {"logits", "apart"} & line.keys():
        np.testing.assert_allclose(line[name], theirs, atol=2e-4)
