"""The tables of docs/speculative_config.md: ``python -m tests.api.config.docs_tables``."""

from jspec.api.config import keys
from jspec.drafters import METHODS
from jspec.drafters.trees import tree_settings
from jspec.verify import RULES

_STANDINGS = {"works": "works", "not built": "raises until built", "refused": "refused"}
_NOT_IN_VLLM = (keys.HYBRID, "hydra", "token_recycling")


def markdown() -> str:
    """Return all tables."""
    return "\n".join(
        (
            _table("key", "vLLM's default", "standing", "", rows=_keys()),
            _table("`method`", "standing", "", rows=_methods()),
            _table("`rejection_sample_method`", "standing", "", rows=_rules()),
            _table("`tree`", "nodes with the root", "depth", rows=_trees()),
        )
    )


def _table(*headings, rows):
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _keys():
    for key in keys.KEYS.values():
        yield f"`{key.name}`", f"`{key.default}`", _STANDINGS[key.standing], key.note


def _methods():
    for name in METHODS:
        yield f"`{name}`", "works", "not in vLLM" if name in _NOT_IN_VLLM else ""
    for name, same in keys.METHOD_ALIASES.items():
        yield f"`{name}`", "works", f"the same as `{same}`"
    yield f"`{keys.CUSTOM_CLASS}`", "works", keys.CUSTOM_CLASS_NOTE
    for name, why in keys.METHODS_REFUSED.items():
        yield f"`{name}`", "refused", why


def _rules():
    for name, rule in keys.RULE_NAMES.items():
        lossy = "" if RULES[rule].lossless else "; lossy: the output does not follow the target"
        yield f"`{name}`", "works", f"rule `{rule}`{lossy}"
    for name in keys.RULES_NOT_BUILT:
        yield f"`{name}`", "raises until built", "lossy"


def _trees():
    for name in tree_settings.NAMES:
        size = "`num_speculative_tokens` + 1" if name == "chain" else "`tree_size`"
        sizes = size, "`num_speculative_tokens`"
        if name in tree_settings.PUBLISHED:
            tree = tree_settings.published(name)
            sizes = str(tree.size), str(tree.max_depth)
        yield f"`{name}`", *sizes


if __name__ == "__main__":
    print(markdown())
