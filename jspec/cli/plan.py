"""``jspec plan``."""

import typer

from jspec.cli import options
from jspec.cli.options import option


def plan(
    model: options.model("A config.json is enough.") = None,
    model_flag: options.Model = None,
    device: option(str, "Kind and number of chips: v5e-8, v6e, 7x-4, H200, H100-2, ...") = "v5e",
    max_num_seqs: options.engine_option("max_num_seqs") = 32,
    max_model_len: options.engine_option("max_model_len") = None,
    dtype: options.Dtype = "auto",
    quantization: options.engine_option("quantization") = None,
    kv_cache_dtype: options.engine_option("kv_cache_dtype") = "auto",
    data_parallel_size: options.engine_option("data_parallel_size") = 1,
    speculative_config: options.Config = None,
    context: option(int | None, "Tokens of a sequence, for the limit. Default: 2048.") = None,
    acceptance_length: option(
        float | None, "Tokens of a round and sequence. Default: half of K is accepted."
    ) = None,
    memory_share: option(
        float | None,
        "Share of a chip's memory that JAX takes. Default: 0.75 of a GPU, all of a TPU.",
        envvar="XLA_PYTHON_CLIENT_MEM_FRACTION",
        min=0.01,
        max=1.0,
    ) = None,
) -> None:
    """Say what a model takes on a device that is not there, and its speed at most.

    The exit code is 1 if it does not fit.
    """
    model = options.model_of(model, model_flag)
    if model is None:
        raise ValueError("give a MODEL: a directory, a config.json, a GGUF file or a hub id.")
    from jspec.tools.plan import plan

    report = plan(
        model,
        device,
        speculative_config=options.speculative_config(speculative_config),
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        context=context,
        acceptance_length=acceptance_length,
        memory_share=memory_share,
        data_parallel_size=data_parallel_size,
    )
    print(report)
    if not report.memory.fits:
        raise typer.Exit(1)
