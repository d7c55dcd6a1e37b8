"""Modules for later tokens (MTP) in the files of their target, where servers look for them."""

import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.checkpoint import load_config
from jspec.checkpoints.families import text_part
from jspec.checkpoints.families.names import EMBEDDING, HEAD, mtp_prefixes
from jspec.checkpoints.files import model_files
from jspec.checkpoints.files.model_files import ANY_WEIGHTS, PathLike
from jspec.checkpoints.heads import mtp
from jspec.models.heads.mtp import MtpConfig, MtpParams
from jspec.util import staging

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def stitch(
    directory: PathLike,
    target: PathLike,
    config: MtpConfig,
    params: MtpParams,
    *,
    dtype: Any = None,
) -> None:
    """Write a target with modules in its own files.

    The target's tensors stay bit for bit, except modules that it had, which are replaced. Its other
    files are copied. Names are those of the target's family, or MiMo's if it has none.
    ``num_nextn_predict_layers`` in config.json is the number of modules. An interrupted call leaves
    the old files whole.

    Args:
      directory: created if it does not exist.
      target: a local directory or a hub id; may be ``directory`` itself.
      config: config of the modules.
      params: weights of the modules.
      dtype: dtype of the modules, float32, bfloat16 or float16; None for the target's.

    Raises:
      ValueError: the modules are not for this target, or its names cannot express them.
    """
    sizes, raw = load_config(target)
    layout = mtp.natural_layout(sizes)
    mtp.check(config, layout, sizes)
    source = model_files.locate_weights(target)
    tensors = text_part.tensors_of(model_files.open_tensors(source))
    stale = mtp_prefixes(sizes, raw)
    extra = {name: tensor for name, tensor in tensors.items() if not name.startswith(stale)}
    dtype = model_files.known_dtype(dtype or tensors[EMBEDDING].dtype)
    pair = (tensors[name] for name in (EMBEDDING, HEAD if HEAD in tensors else EMBEDDING))
    extra |= mtp.copies(config, *(np.asarray(jnp.asarray(x, dtype)) for x in pair))
    entries = mtp.FORMAT.layout(layout, config).entries(config)
    model_files.check_params(entries, params)
    raw = raw | {"num_nextn_predict_layers": config.n_predict}
    with staging.replace_files(directory, ANY_WEIGHTS) as aside:
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, aside / file.name)
        model_files.write_json(aside / "config.json", raw)
        model_files.write_weights(aside, entries, params, dtype, extra=extra)
