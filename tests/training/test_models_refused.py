"""Models that training does not take are refused by their config.json, before any work."""

import pytest

from tests.families import models
from training import distill

EXPERTS = "layers with experts cannot be trained; give a --draft of plain blocks"
STATES = "layers with a state cannot be trained with --parallel; give a --draft of plain blocks"


@pytest.mark.parametrize(
    ("target", "draft", "options", "message"),
    [
        ("cohere2", "", "eagle", "--target '{target}' does not work; its logits are scaled, which"),
        ("gemma2", "", "medusa", "its logits are capped, which training does not compute"),
        ("phimoe", "", "eagle --variant hass", "its logits are biased, which"),
        ("gemma4_text-shared", "", "mtp", "some layers read the keys and values of others, which"),
        ("llama4_text", "", "eagle", "it has attention in chunks, which training does not compute"),
        ("qwen3", "gemma2", "draft", "--draft '{draft}' does not work; its logits are capped"),
        ("qwen3", "qwen3_next", "draft", f"--draft '{{draft}}' does not work; {EXPERTS}"),
        (
            "qwen3_next",
            "",
            "draft --draft-layers 1",
            f"--draft-layers (1,) does not work; {EXPERTS}",
        ),
        ("qwen3", "qwen3_5_text", "draft --parallel", STATES),
        ("qwen3_5_text", "", "draft --parallel --draft-layers 0 1", STATES),
    ],
)
def test_models_that_cannot_be_trained_are_refused_in_one_line(
    target, draft, options, message, tmp_path_factory, tmp_path, capsys
):
    folder = tmp_path_factory.getbasetemp() / "families"
    target = models.saved(target, folder)
    argv = [*options.split(), "--target", str(target), "--output", str(tmp_path / "run")]
    argv += ["--data", str(tmp_path), "--held-out-share", "0.1", "--length", "32"]
    if draft:
        argv += ["--draft", str(draft := models.saved(draft, folder))]
    for more in ([], ["--dry-run"]):
        assert distill.main([*argv, *more]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert message.format(target=target, draft=draft) in line
    assert not (tmp_path / "run").exists()
