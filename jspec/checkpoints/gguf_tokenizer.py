"""The tokenizer and the chat template in the metadata of a GGUF file.

Byte-level BPE (``gpt2``) and SentencePiece BPE (``llama``, ``gemma4``) become fast tokenizers of
``transformers``. The names in ``tokenizer.ggml.pre`` and the splits that they stand for are
llama.cpp's (src/llama-vocab.cpp); the patterns are those of the models' own tokenizer.json.
"""

import functools
from typing import Any

from jspec.checkpoints.gguf_config import CONTROL, ENDS
from jspec.checkpoints.gguf_files import GgufFile
from jspec.util.messages import first_line, shown

_UNKNOWN, _USER_DEFINED = 2, 4  # ggml's types of tokens
_SPACE = "▁"  # SentencePiece's
_GEMMA4 = "gemma4"  # SentencePiece BPE with the merges of tokenizer.json

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_CASED_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"

_GPT2 = ()  # the byte-level step has this pattern itself
_LLAMA3 = (rf"{_WORDS}\p{{N}}{{1,3}}|{_MARKS}{_TAIL}",)
_QWEN2 = (rf"{_WORDS}\p{{N}}|{_MARKS}{_TAIL}",)
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}",
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
)
_TEKKEN = (rf"{'|'.join(_CASED)}|\p{{N}}|{_CASED_MARKS}{_TAIL}",)
_GPT4O = (
    rf"{'|'.join(f'{cased}{_CONTRACTION}?' for cased in _CASED)}|\p{{N}}{{1,3}}|"
    rf"{_CASED_MARKS}{_TAIL}",
)
_SEED = (rf"{_WORDS}\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}",)
_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O)
_MINICPM5 = (r"\p{N}{1,3}", rf"{_WORDS}\p{{N}}+|{_MARKS}{_TAIL}")
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = (
    "[\r\n]",
    # Letters with case; Armenian and Georgian small ones are not in the list of its authors.
    r"\s?[[\p{Lu}\p{Ll}\p{Lt}]&&[^\u0560-\u0588\u10d0-\u10ff]]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    *(r"\s+$", _EAST_ASIAN, r"\p{N}"),
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_DIGITS = "digits"  # each digit alone, then GPT-2's pattern

SPLITS: dict[str, Any] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4"), _GPT2),
    **dict.fromkeys(("a.x-4.0", "gigachat", "mellum", "granite-docling"), _GPT2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("falcon-h1", "midm-2.0", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("kormo", "solar-open", "grok-2"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone", "codeshell"), _DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _AYA),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    "minicpm5": _MINICPM5,
    "qwen35": _QWEN35,
    "seed-coder": _SEED,
    "tekken": _TEKKEN,
}
# llama.cpp begins texts with BOS for these, unless the metadata say otherwise.
_ADDS_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")
_ADDS_BOS += ("falcon-h1", "midm-2.0")
# These take a text that is a token as a whole before they merge.
_WHOLE_FIRST = (*_ADDS_BOS, "gpt-4o", "llama4", "minicpm5")


def read(file: GgufFile) -> Any:
    """Return the tokenizer of a GGUF file, a ``transformers.PreTrainedTokenizerFast``.

    Raises:
      ValueError: there is none, it is damaged, or its kind is not supported.
    """
    from transformers import PreTrainedTokenizerFast

    get = lambda key, default=None: file.get(f"tokenizer.ggml.{key}", default)
    kind, tokens = get("model"), get("tokens")
    if kind not in _KINDS or not tokens:
        known = ", ".join(_KINDS)
        raise ValueError(
            f"{file.path} has no tokenizer that is understood (tokenizer.ggml.model "
            f"{shown(kind)}; known: {known}); pass tokenizer= or token ids"
        )
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
    ids = {name: (key, get(f"{key}_token_id")) for name, key in names.items()}
    special = {
        f"{name}_token": None if index is None else _at(file, tokens, key, index)
        for name, (key, index) in ids.items()
    }
    tokenizer = _made(file, tokens)
    _add_tokens(tokenizer, tokens, get("token_type", []))
    _add_ends(tokenizer, file, special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_templates(file),
        clean_up_tokenization_spaces=False,
        name_or_path=str(file.path),
        model_max_length=file.get("{arch}.context_length", int(1e30)),
        **{name: token for name, token in special.items() if token is not None},
    )


def _made(file: GgufFile, tokens: list[str]) -> Any:
    """Return the tokenizer of ``tokenizers``, which raises bare exceptions for damaged tables."""
    try:
        return _KINDS[file.get("tokenizer.ggml.model")](file, tokens)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"{file.path} has a damaged tokenizer ({first_line(error)}); download it "
            "again, or pass tokenizer= with the original model's directory or hub id"
        ) from None


def _at(file: GgufFile, tokens: list[str], key: str, index: int) -> str:
    if not 0 <= index < len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.{key}_token_id={index} is outside the vocabulary of "
            f"{len(tokens)}; download it again"
        )
    return tokens[index]


def _templates(file: GgufFile) -> str | dict[str, str] | None:
    """Return the chat template, or all of them by name if the file names others too."""
    first = file.get("tokenizer.chat_template")
    names = file.get("tokenizer.chat_templates") or []
    named = {name: file.get(f"tokenizer.chat_template.{name}") for name in names}
    return {"default": first} | named if named and first else first


def _byte_level(file: GgufFile, tokens: list[str]) -> Any:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    kind = file.get("tokenizer.ggml.pre")
    if kind not in SPLITS:
        raise ValueError(
            f"{file.path} splits texts as {shown(kind)} (tokenizer.ggml.pre), which is not known; "
            "pass tokenizer= with the original model's directory or hub id"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    whole_first = kind in _WHOLE_FIRST
    model = models.BPE(vocab=vocabulary, merges=_merges(file), ignore_merges=whole_first)
    tokenizer = tokenizers.Tokenizer(model)
    splits, byte_level = SPLITS[kind], pre_tokenizers.ByteLevel
    if splits == _DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True), byte_level(add_prefix_space=False)]
    else:
        steps = [pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in splits]
        steps.append(byte_level(add_prefix_space=False, use_regex=not splits))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if kind in ("qwen2", "deepseek-r1-qwen", "megrez", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(file: GgufFile) -> list[tuple[str, ...]]:
    return [tuple(pair.split(" ", 1)) for pair in file.get("tokenizer.ggml.merges", [])]


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Any:
    import tokenizers
    from tokenizers import decoders, models, normalizers
    from transformers.convert_slow_tokenizer import generate_merges

    vocabulary = {token: index for index, token in enumerate(tokens)}
    is_gemma4 = file.get("tokenizer.ggml.model") == _GEMMA4
    merges, scores = _merges(file), file.get("tokenizer.ggml.scores") or []
    if not is_gemma4:  # Merges have the order of the scores.
        if len(scores) != len(tokens):
            raise ValueError(
                f"{file.path} has {len(tokens)} tokens and {len(scores)} scores; download it again"
            )
        merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    unknown = _at(file, tokens, "unknown", file.get("tokenizer.ggml.unknown_token_id", 0))
    model = models.BPE(
        vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    prefixed = file.get("tokenizer.ggml.add_space_prefix", not is_gemma4)
    steps = [normalizers.Prepend(_SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Strip(content=" ", left=1)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *steps]
    )
    return tokenizer


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece, _GEMMA4: _sentencepiece}


def _add_tokens(tokenizer: Any, tokens: list[str], kinds: list[int]) -> None:
    """Mark the tokens that texts contain as a whole; control tokens and ends are special."""
    from tokenizers import AddedToken

    added = functools.partial(AddedToken, normalized=False)
    typed = [(t, CONTROL if t in ENDS else k) for t, k in zip(tokens, kinds, strict=False)]
    of = lambda *wanted: [token for token, kind in typed if kind in wanted]
    tokenizer.add_special_tokens([added(t, special=True) for t in of(CONTROL, _UNKNOWN)])
    tokenizer.add_tokens([added(t) for t in of(_USER_DEFINED)])


def _add_ends(tokenizer: Any, file: GgufFile, special: dict[str, str | None]) -> None:
    """Begin texts with BOS and end them with EOS, where the file says so."""
    from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

    kind, pre = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    adds = file.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _ADDS_BOS)
    # The chat template of Gemma 4 writes BOS, and its tokenizer.json does not, whatever files say.
    bos = special["bos_token"] if adds and kind != _GEMMA4 else None
    eos = special["eos_token"] if file.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return
    around = lambda text: [token for token in (bos, text, eos) if token is not None]
    template = TemplateProcessing(
        single=around("$A"),
        pair=[*around("$A"), *(f"{item}:1" for item in around("$B"))],
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in {bos, eos} - {None}],
    )
    tokenizer.post_processor = Sequence([ByteLevel(trim_offsets=False), template])
