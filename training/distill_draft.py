"""Short form of ``python -m training.distill draft``."""

import functools
import sys

from training import distill

main = functools.partial(distill.run_method, "draft", module="training.distill_draft")

if __name__ == "__main__":
    sys.exit(main())
