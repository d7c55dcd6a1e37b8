"""OpenAI's HTTP API over ``AsyncLLM``. It needs the extra ``serve``, and no JAX of its own."""
