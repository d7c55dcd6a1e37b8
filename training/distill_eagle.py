"""Short form of ``python -m training.distill eagle``."""

import functools
import sys

from training import distill

main = functools.partial(distill.run_method, "eagle", module="training.distill_eagle")

if __name__ == "__main__":
    sys.exit(main())
