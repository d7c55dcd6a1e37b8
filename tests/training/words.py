"""A tokenizer of a dozen words, for labels derived by hand."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<end>", "<user>", "<assistant>", "<system>")
WORDS = (
    "\n",
    " ",
    "hi",
    "there",
    "how",
    "are",
    "you",
    "fine",
    "bye",
    "be",
    "kind",
    "###",
    "hmm",
)
IDS = {token: number for number, token in enumerate(SPECIAL + WORDS)}

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>"
    "{% generation %}{{ m.content }}<end>{% endgeneration %}{{ '\n' }}"
    "{% else %}<{{ m.role }}>{{ m.content }}<end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Writes "hmm" only before the last answer, like templates that drop earlier thoughts.
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.last %}hmm\n{% endif %}{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# The generation prompt differs from the turn.
BROKEN = PLAIN.replace("<assistant>{% endif %}", "<assistant>hmm{% endif %}")
# A turn ends in text, not in a special token.
WORDY = PLAIN.replace("<end>\n", "\n###\n")

USER, ASSISTANT = ({"role": role} for role in ("user", "assistant"))
DIALOGUE = (
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "how are you"},
    {"role": "user", "content": "fine"},
    {"role": "assistant", "content": "bye"},
)


def tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer: words, spaces, line ends and ``<end>`` are a token each."""
    made = Tokenizer(models.WordLevel(IDS, unk_token="hmm"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n| |[^\n ]+"), behavior="isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<end>",
        chat_template=chat_template,
        additional_special_tokens=list(SPECIAL[1:]),
        clean_up_tokenization_spaces=False,
    )


def ids(*tokens: str) -> list[int]:
    """Return the ids of tokens."""
    return [IDS[token] for token in tokens]
